# shellcheck shell=bash
# Sourced by launch/demo and launch/test: makes .venv with the pinned packages, or leaves it alone when it is up to date.
# COCODIFF_TORCH=WHEEL_OR_SPEC installs that torch instead of the pinned one (a CPU wheel, an XPU or CUDA build).
# pip's own settings (its configuration files and PIP_* variables) are honoured.

fail() {
    echo "$0: $*" >&2
    exit 1
}

# Whether this machine is of the kind that SYCL's CPU runtime is published for.
has_sycl() {
    [ "$(uname -sm)" = "Linux x86_64" ]
}

# Whether this machine can emulate others: root who may make network namespaces, with iproute2.
can_emulate() {
    [ "$(id -u)" -eq 0 ] && unshare --net true 2>/dev/null && command -v ip >/dev/null && command -v tc >/dev/null
}

# Whether mpi4py finds an MPI library. It is not initialised: outside a job some machines refuse that.
loads_mpi() {
    .venv/bin/python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI'
}

prepare_environment() {
    local python=${COCODIFF_PYTHON:-python3} extras=test wanted pins
    command -v "$python" >/dev/null || fail "no $python: install Python 3.10 or newer (Debian: apt install python3 python3-venv)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: Python 3.10 or newer is needed; name one with COCODIFF_PYTHON=python3.11"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "this Python cannot make virtual environments: install python3-venv (Debian: apt install python3-venv)"
    if has_sycl; then extras=$extras,sycl; fi

    wanted=$(cat pyproject.toml launch/constraints.txt | sha256sum | cut -c1-16)-$extras-${COCODIFF_TORCH:-pinned}
    if [ -e .venv/ready ] && [ "$(cat .venv/ready)" = "$wanted" ]; then return; fi

    pins=.venv/constraints.txt
    [ -x .venv/bin/python ] || "$python" -m venv .venv || fail "could not make .venv (see above)"
    rm -f .venv/ready
    cp launch/constraints.txt $pins
    if [ -n "${COCODIFF_TORCH:-}" ]; then sed -i '/^torch==/d' $pins; fi
    echo "installing into .venv: about 0.9 GB to download with a CPU build of torch (a CUDA build is several GB more;"
    echo "COCODIFF_TORCH=WHEEL_OR_SPEC chooses another build), 3.3 GB on disk; log: .venv/install.log"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    {
        .venv/bin/python -m pip install -c $pins "${COCODIFF_TORCH:-torch}" &&
            .venv/bin/python -m pip install -c $pins -e ".[$extras]" &&
            # A machine with an MPI of its own keeps it: the one from PyPI would be picked up instead. An mpiexec on PATH
            # tells nothing, as it may be another environment's: what counts is whether mpi4py finds a library to load.
            { loads_mpi || .venv/bin/python -m pip install -c $pins -e ".[local-mpi]"; }
    } >.venv/install.log 2>&1 || {
        tail -n 5 .venv/install.log >&2
        fail "the installation failed; the whole log is .venv/install.log"
    }
    echo "$wanted" >.venv/ready
}
