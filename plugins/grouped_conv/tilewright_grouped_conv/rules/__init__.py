"""Rules on configurations of convolution."""
