#!/bin/sh
# Runs inside the build: a virtual environment in /opt/venv with torch, numpy and py-spy (which tells where a rank
# hangs), and nothing else that training does not need. Usage: torch.sh cpu|cuda, with TORCH, TORCH_INDEX (cpu only)
# and EXTRA (more packages) in the environment, and PIP_INDEX_URL where all else comes from a mirror.
# Wheels in /context/wheels/cpu|cuda save the network.
set -eu

FLAVOUR=$1
VENV=/opt/venv
WHEELS=/context/wheels/$FLAVOUR
CA=/run/secrets/ca
: "${TORCH:?pass --build-arg TORCH=the torch version}"

[ ! -s $CA ] || export PIP_CERT=$CA SSL_CERT_FILE=$CA
python3 -m venv $VENV
if [ -d "$WHEELS" ]; then
  set -- --no-index --find-links "$WHEELS"
elif [ -n "${TORCH_INDEX:-}" ]; then
  # torch alone from there, as an index of torch's own lacks py-spy; and by its file, or another index might win.
  $VENV/bin/pip download --no-deps --dest /tmp/torch --disable-pip-version-check --index-url "$TORCH_INDEX" "torch==$TORCH"
  set -- --find-links /tmp/torch /tmp/torch/torch-*.whl
else
  set --
fi
# shellcheck disable=SC2086  # EXTRA is a list
$VENV/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check "$@" "torch==$TORCH" numpy py-spy ${EXTRA:-}

SITE=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Headers, CMake files, static libraries, C++ test programs: all for building against torch.
rm -rf "$SITE"/torch/include "$SITE"/torch/share "$SITE"/torch/test "$SITE"/torch/lib/*_test.so "$SITE"/numpy/_core/include
find "$SITE" -name '*.a' -delete
find "$SITE/torch/bin" -type f ! -name torch_shm_manager -delete
# Test suites of the libraries; torch's own torch.testing stays, and what its modules import from inside packages too.
find "$SITE"/sympy "$SITE"/networkx "$SITE"/mpmath "$SITE"/numpy -type d -name tests -prune -exec rm -rf {} +
rm -rf /tmp/torch "$SITE"/pip "$SITE"/pip-*.dist-info "$VENV"/bin/pip*
# Hash-based and unchecked: right whatever happens to the files' times on the way into another layer.
$VENV/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x /py312_ "$SITE"
$VENV/bin/python -c 'import numpy, torch, torch.distributed; print("torch", torch.__version__, "numpy", numpy.__version__)'
