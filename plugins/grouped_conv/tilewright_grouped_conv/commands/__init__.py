"""Problems of convolution on the command line and in sweeps."""
