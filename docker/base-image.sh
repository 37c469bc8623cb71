#!/usr/bin/env bash
# Build the base image of the nodes without any image registry: Debian 12 (it has Python 3.11) by mmdebstrap.
# Packages come from the mirrors that this machine's own apt sources name. Usage: base-image.sh [IMAGE]
set -euo pipefail

IMAGE=${1:-torchrack-base:bookworm}
SUITE=bookworm
PACKAGES=ca-certificates,iproute2,iputils-ping,openssh-server,procps,python3,python3-venv
# Made merged from the start: left to itself, apt would take usrmerge, and with it 47 MB of Perl.
MERGED=/usr/share/mmdebstrap/hooks/merged-usr
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

say() { echo "base-image.sh: $*" >&2; }

mirror() { # the first mirror in this machine's sources whose path ends in $1 (debian or debian-security)
  { cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    grep -v '^[[:space:]]*#' | grep -oE "[a-z+]+://[^][:space:]]+/$1/?([[:space:]]|$)" | head -n 1 | tr -d '[:space:]'
}

sources() {
  local main security
  main=$(mirror debian) || { say "no Debian mirror in /etc/apt: this script needs a Debian host"; exit 1; }
  echo "deb $main $SUITE main"
  echo "deb $main $SUITE-updates main"
  if security=$(mirror debian-security); then echo "deb $security $SUITE-security main"; fi
}

command -v mmdebstrap >/dev/null || { say "mmdebstrap is missing: apt-get install mmdebstrap"; exit 1; }
[ -f "$KEYRING" ] || { say "$KEYRING is missing: apt-get install debian-archive-keyring"; exit 1; }
SOURCES=$(sources)

old=$(docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null || true)
say "building $IMAGE ($SUITE: ${PACKAGES//,/ })"
# shellcheck disable=SC2016  # $1 is the hook's own
mmdebstrap --quiet --variant=minbase --include="usr-is-merged,$PACKAGES" --hook-dir="$MERGED" --keyring="$KEYRING" \
  --format=tar \
  --aptopt='Acquire::Languages "none"' \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --customize-hook='rm -f "$1"/etc/ssh/ssh_host_*' \
  "$SUITE" - <<<"$SOURCES" |
  docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["bash"]' - "$IMAGE" >/dev/null
say "$IMAGE: $(docker image inspect --format '{{.Size}}' "$IMAGE") bytes"
# The one it replaces, if no other image is built on it.
[ -z "$old" ] || docker image rm "$old" >/dev/null 2>&1 || true
