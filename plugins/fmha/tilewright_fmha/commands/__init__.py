"""Problems of attention on the command line and in sweeps."""
