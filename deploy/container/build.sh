#!/bin/sh
# build.sh cpu|cuda|rocm [TAG]: the image of a kind, by podman, buildah or docker, whichever is there.
# BASE and ENGINE override the base image and the program; PRINT=1 prints the command instead of running it.
set -eu
cd "$(dirname "$0")/../.."
case "${1:-}" in
  # No toolkit: kernels are compiled by NVRTC from PyPI, the driver's library comes with the container runtime.
  cpu) base=docker.io/library/python:3.12-slim extras=server,metrics,compiler ;;
  cuda) base=docker.io/library/python:3.12-slim extras=server,metrics,cuda ;;
  rocm) base=docker.io/rocm/dev-ubuntu-24.04:7.0 extras=server,metrics,hip ;;
  *) echo "usage: build.sh cpu|cuda|rocm [TAG]" >&2; exit 2 ;;
esac
tag=${2:-tilewright:$1}
engine=${ENGINE:-$(command -v podman || command -v buildah || command -v docker || true)}
[ -n "$engine" ] || { echo "build.sh: install podman, buildah or docker, or name one with ENGINE" >&2; exit 1; }
set -- "$engine" build --file deploy/container/Containerfile --build-arg "BASE=${BASE:-$base}" \
  --build-arg "EXTRAS=$extras" --tag "$tag" .
if [ -n "${PRINT:-}" ]; then echo "$*"; exit 0; fi
make wheel
exec "$@"
