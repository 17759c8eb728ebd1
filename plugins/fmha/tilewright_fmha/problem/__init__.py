"""Problems of attention: read from requests, described, resized."""
