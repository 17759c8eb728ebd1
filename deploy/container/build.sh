#!/bin/sh
# build.sh cpu|cuda|rocm [TAG]: the image of a kind, by podman, buildah or docker, whichever is there.
# BASE and ENGINE override the base image and the program; PRINT=1 prints the command instead of running it.
# WHEELS names a folder with the wheels of all that is installed ('pip download'): then no index is asked.
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
[ -z "${WHEELS:-}" ] || [ -d "$WHEELS" ] || { echo "build.sh: WHEELS names no folder: $WHEELS" >&2; exit 1; }
context=build/image-$1
# No cache: what a step mounts is no part of the keys of podman's and buildah's.
set -- "$engine" build --no-cache --file deploy/container/Containerfile --build-arg "BASE=${BASE:-$base}" \
  --build-arg "EXTRAS=$extras" --build-arg "PIP_NO_INDEX=${WHEELS:+1}" --tag "$tag" "$context"
if [ -n "${PRINT:-}" ]; then echo "$*"; exit 0; fi
# The image's context has the wheel as it is now, and no older one of dist/.
rm -rf "$context"
mkdir -p "$context/dist" "$context/deploy/container"
trap 'rm -rf "$context"' EXIT
[ -z "${WHEELS:-}" ] || cp "$WHEELS"/*.whl "$context/dist/"
rm -f "$context"/dist/tilewright-*.whl
make wheel
cp "$(ls -t dist/tilewright-*.whl | head -n 1)" "$context/dist/"
cp deploy/container/install.sh "$context/deploy/container/"
"$@"
