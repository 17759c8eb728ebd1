"""Parts that suites and scripts share: timing, peers, and engines without the service."""
