#!/bin/sh
# Runs inside the build: install Debian packages and leave nothing else. Usage: apt.sh PACKAGE...
set -eu
export DEBIAN_FRONTEND=noninteractive

missing=
for name in "$@"; do
  dpkg -s "$name" >/dev/null 2>&1 || missing="$missing $name"
done
[ -n "$missing" ] || exit 0 # the base from base-image.sh has all of the nodes' packages: no network needed

set --
[ ! -s /run/secrets/ca ] || set -- -o Acquire::https::CAInfo=/run/secrets/ca
apt-get "$@" update -q
# shellcheck disable=SC2086  # a list
apt-get "$@" install -y -q --no-install-recommends $missing
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log /etc/ssh/ssh_host_*
