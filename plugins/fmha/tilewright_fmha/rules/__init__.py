"""Rules on configurations of attention."""
