#!/usr/bin/env bash
# A command of the image (python, torchrun: whatever name this file is called by), as if it were installed on this host:
# the same user, processes, network, /dev/shm, hostname and files. The image is no fence, only where torch comes from.
set -euo pipefail
image='' gpus='' bin='' # of the settings, which the deploy left here
# shellcheck source=/dev/null
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../settings"
[ "${0##*/}" != usable ] || exec docker image inspect "$image" >/dev/null 2>&1
export TORCHRACK_PYTHON="$bin/python" # what facts.py shall call this Python: its own path is one in the image

# No --init: with the host's processes in view it is not process 1, and the supervisor adopts orphans itself.
# The log driver would keep a second copy of all output.
options=(--rm --interactive --pull=never --log-driver=none --network=host --ipc=host --pid=host --uts=host
  --security-opt=seccomp=unconfined --security-opt=apparmor=unconfined --security-opt=label=disable
  --cap-add=SYS_PTRACE --user="$(id -u):$(id -g)" --workdir="$PWD")
for group in $(id -G); do
  options+=("--group-add=$group")
done
for name in $(compgen -e); do # by name: a value would be seen in the list of processes
  [ "$name" = PATH ] || options+=("--env=$name")
done

# Paths mean the same inside; a folder below one of the system's own is named itself.
declare -A folders=()
for path in /* "${HOME:-/}" "$(dirname -- "$(dirname -- "$bin")")"; do
  case $path in
    / | /bin | /boot | /dev | /etc | /lib* | /lost+found | /opt | /proc | /run | /sbin | /snap | /sys | /usr | /var) ;;
    *) [ ! -d "$path" ] || folders[$path]=1 ;;
  esac
done
for path in "${!folders[@]}"; do
  options+=("--volume=$path:$path")
done
for path in /etc/passwd /etc/group /etc/nsswitch.conf /etc/nccl.conf /etc/ssl /etc/pki; do
  [ ! -e "$path" ] || options+=("--volume=$path:$path:ro")
done

[ -z "$gpus" ] || options+=("--gpus=$gpus" "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility")
[ ! -d /dev/infiniband ] || options+=(--device=/dev/infiniband)
if [ -n "$gpus" ] || [ -d /dev/infiniband ]; then # both pin memory; elsewhere Docker itself may lack the right to raise it
  options+=(--ulimit=memlock=-1 --ulimit=stack=67108864)
fi
exec docker run "${options[@]}" "$image" "${0##*/}" "$@"
