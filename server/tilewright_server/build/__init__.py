"""From a source unit to a loadable binary: toolchains, the artifact cache and the build pool."""
