"""Commands about bundles: build, show, verify, run."""
