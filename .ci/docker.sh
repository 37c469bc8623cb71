#!/usr/bin/env bash
# Install and start Docker Engine, Compose v2, buildx and mmdebstrap on a fresh Debian 12 or 13, as root. Repeatable.
set -euo pipefail

LOG=${DOCKERD_LOG:-/var/log/dockerd.log}
WAIT_S=60
# Debian 12 has no docker-buildx and only the v1 docker-compose: those two packages come from the next release.
NEWER=trixie

say() { echo "docker.sh: $*" >&2; }

in_apt() { [ -n "$(apt-cache madison "$1" 2>/dev/null)" ]; }

install_missing() {
  local missing=() name
  for name in "$@"; do
    dpkg -s "$name" >/dev/null 2>&1 || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return
  say "installing ${missing[*]}"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}

mirror() { # the Debian mirror that this machine's own sources use
  { cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    grep -v '^[[:space:]]*#' | grep -oE '[a-z+]+://[^][:space:]]+/debian/?([[:space:]]|$)' | head -n 1
}

add_newer_plugins() { # pinned, so that nothing else can ever come from that suite
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
    "$(mirror)" "$NEWER" /usr/share/keyrings/debian-archive-keyring.gpg >/etc/apt/sources.list.d/docker-plugins.sources
  printf 'Package: *\nPin: release n=%s\nPin-Priority: -1\n\nPackage: docker-compose docker-buildx\nPin: release n=%s\nPin-Priority: 990\n' \
    "$NEWER" "$NEWER" >/etc/apt/preferences.d/docker-plugins
  apt-get update -q >&2
}

plugins_there() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

install_packages() {
  command -v dockerd >/dev/null && command -v iptables >/dev/null && command -v mmdebstrap >/dev/null && plugins_there && return
  local wanted=(docker.io iptables mmdebstrap ca-certificates)
  apt-get update -q >&2
  in_apt docker-cli && wanted+=(docker-cli) # Debian 13 packages the client apart
  install_missing "${wanted[@]}"
  plugins_there && return
  in_apt docker-buildx || add_newer_plugins
  install_missing docker-compose docker-buildx
}

start_engine() {
  docker info >/dev/null 2>&1 && return
  say "starting dockerd, log in $LOG"
  # Debian's package starts the engine only under an init system. Here it gets a session of its own, so that it
  # outlives this script and no signal meant for the script reaches it.
  setsid dockerd >"$LOG" 2>&1 </dev/null &
  for ((i = 0; i < WAIT_S * 2; i++)); do
    docker info >/dev/null 2>&1 && return
    sleep 0.5
  done
  say "dockerd did not answer within $WAIT_S s; the end of $LOG:"
  tail -n 20 "$LOG" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || { say "must run as root"; exit 1; }
install_packages
start_engine
docker version --format 'engine {{.Server.Version}}, client {{.Client.Version}}' >&2
docker compose version >&2
docker buildx version >&2
docker info --format 'storage {{.Driver}}, cgroup {{.CgroupVersion}}' >&2
