"""Rules on configurations of tiled products."""
