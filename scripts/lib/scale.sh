# Sourced by scripts/scale-context.sh and scripts/scale-generation.sh: scales one role of a Helm release.
# shellcheck shell=bash

readonly most_replicas=1000

usage() {
    cat << TEXT
usage: $(basename "$0") N [--release NAME] [--namespace NAMESPACE] [--timeout SECONDS]

Set the number of $1 servers of a twostroke release to N, and wait until they are ready.

  --release NAME        Helm release            (default: \$TWOSTROKE_RELEASE, or twostroke)
  --namespace NAMESPACE its namespace           (default: \$TWOSTROKE_NAMESPACE, or kubectl's current one)
  --timeout SECONDS     how long to wait        (default: 900; 0 does not wait)

KUBECTL names another kubectl. A later \`helm upgrade\` sets the number to the chart's value again.
TEXT
}

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# is_count TEXT: a whole number without sign or leading zeros.
is_count() { [[ $1 =~ ^(0|[1-9][0-9]{0,5})$ ]]; }

# scale_role ROLE ARGUMENTS...
scale_role() {
    local role=$1 replicas='' timeout=900
    local release=${TWOSTROKE_RELEASE:-twostroke} namespace=${TWOSTROKE_NAMESPACE:-}
    shift
    while (($#)); do
        case $1 in
            -h | --help) usage "$role"; exit 0 ;;
            --release | --namespace | --timeout)
                (($# >= 2)) || die "$1 needs a value"
                case $1 in
                    --release) release=$2 ;;
                    --namespace) namespace=$2 ;;
                    --timeout) timeout=$2 ;;
                esac
                shift 2 ;;
            -*) die "unknown option $1; see --help" ;;
            *)
                [[ -z $replicas ]] || die "one number of servers, please: got $replicas and $1"
                replicas=$1
                shift ;;
        esac
    done
    [[ -n $replicas ]] || { usage "$role" >&2; exit 2; }
    is_count "$replicas" && ((replicas >= 1 && replicas <= most_replicas)) \
        || die "the number of servers must be from 1 to $most_replicas, got '$replicas'"
    is_count "$timeout" || die "--timeout must be a number of seconds, got '$timeout'"
    [[ $release =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ ]] || die "no release can be named '$release'"

    local kubectl=${KUBECTL:-kubectl}
    command -v "$kubectl" > /dev/null || die "$kubectl is not installed"
    local where=(--selector "app.kubernetes.io/name=twostroke,app.kubernetes.io/instance=$release,app.kubernetes.io/component=$role")
    [[ -z $namespace ]] || where+=(--namespace "$namespace")

    "$kubectl" scale deployment "${where[@]}" --replicas "$replicas"
    ((timeout == 0)) || "$kubectl" rollout status deployment "${where[@]}" --timeout "${timeout}s"
}
