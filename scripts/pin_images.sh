#!/usr/bin/env bash
# Pin the base images to the digests that their tags have in their registries now: `make pin`. Needs skopeo or docker.
set -euo pipefail
cd "$(dirname "$0")/.."
digest() { # of the list of all architectures
  if command -v skopeo >/dev/null; then skopeo inspect --no-tags --format '{{.Digest}}' "docker://$1"
  else docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1"; fi
}
# shellcheck disable=SC2016  # ${POSTGRES_IMAGE is text of compose.yaml
name='s#^(ARG BASE_IMAGE=| +image: (\$\{POSTGRES_IMAGE:-)?)([a-z0-9./-]+:[A-Za-z0-9_.-]+).*#\3#p'
for file in docker/Dockerfile docker/mlflow.Dockerfile docker/compose.yaml .github/workflows/ci.yml; do
  sed -nE "$name" "$file" | while read -r image; do
    found=$(digest "$image")
    [[ $found =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$image has no digest: $found" >&2; exit 1; }
    sed -i -E "s#$image(@sha256:[0-9a-f]*)?#$image@$found#" "$file"
    echo "$file: $image@$found"
  done
done
