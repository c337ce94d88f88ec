#!/usr/bin/env bash
# Set the number of generation servers of a Helm release: scripts/scale-generation.sh N [--release NAME] [--namespace NAMESPACE]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/scale.sh"

scale_role generation "$@"
