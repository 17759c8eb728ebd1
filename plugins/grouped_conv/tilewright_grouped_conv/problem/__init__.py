"""Problems of convolution: read from requests, described, resized."""
