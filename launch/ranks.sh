# Sourced by the job scripts of this folder: puts one rank on each tile and starts cocodiff on all of them.
#
# LAUNCHER  pals (HPE's mpiexec, Aurora), hydra (the mpiexec of Intel MPI and MPICH), srun (torchrun on every node), or
#           emulate (this host as MACHINE, its links SCALE times slower; needs root)
# NODES, RANKS_PER_NODE
# VENV      the folder of cocodiff's environment
# HOSTFILE  the job's nodes, a line each; not for srun
# CPU_BIND  cores of each local rank, as 4-7:8-11; for pals. The others bind by themselves.
# WEIGHTS, SCRATCH   a model's folder, and where on each node a folder for its copy is made; without WEIGHTS none is
# READERS   on more nodes than these the first one reads WEIGHTS and sends them on over MPI (pals, hydra)
# PROXY     how compute nodes reach the world
# HSN_SUFFIX   what makes the first node's name that of its address on the fast network
# MPIEXEC_FLAGS   more words for the launcher
# RESUME=1  goes on where an earlier job into OUT stopped
# SAFE=1    oneCCL waits for each call: for large jobs that hang; nothing overlaps. For pals. Else what the machine's
#           modules set stays.
# FAST=1    where doctor has found all-to-alls right without the modules' CCL_OP_SYNC=1, what comes after it is without
# INPUT, MASK, PRESET, STEPS, OUT, MACHINE, DEVICE, TRANSPORT   of the slices that `restore` restores
# DRY_RUN=1 prints every line that would be run, the one that starts the ranks last, and runs none.
#
# docs/aurora.md explains each variable that is exported here, and has the sources.
# shellcheck shell=bash

fail() {
    echo "$0: $*" >&2
    exit 1
}

# Runs a command line, or prints it.
run() {
    if [ -n "${DRY_RUN:-}" ]; then
        local word line=
        for word in "$@"; do
            # What needs no quoting is shown without.
            [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || printf -v word '%q' "$word"
            line+="$word "
        done
        echo "${line% }"
    else
        "$@"
    fi
}

# Ranks on Aurora, one on each of a node's twelve tiles, for the scripts that are for it alone.
set_aurora() {
    LAUNCHER=pals DEVICE=xpu TRANSPORT=xccl RANKS_PER_NODE=12 MACHINE=${MACHINE:-aurora} VENV=${VENV:-$PWD/.venv-aurora}
    HSN_SUFFIX=.hsn.cm.aurora.alcf.anl.gov # source: ALCF's guide to torch.distributed on Aurora
    # Four cores a rank beside its card: ranks 0-5 on socket 0, 6-11 on socket 1; cores 0 and 52 are the system's.
    CPU_BIND=4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79
    # shellcheck disable=SC2329 # `prepare` calls it
    load_modules() { run module load frameworks; } # ALCF's module: Python, torch with XPU, oneCCL, Aurora MPICH, mpi4py
}

# What compute nodes need to reach the world; what is on the node itself is never behind it.
set_proxies() {
    [ -n "${PROXY:-}" ] || return 0
    export http_proxy=$PROXY https_proxy=$PROXY no_proxy=${no_proxy:-localhost,127.0.0.1} # Python's urllib
}

# oneCCL over MPI, for ranks that PALS started.
set_oneccl() {
    export CCL_PROCESS_LAUNCHER=pmix        # oneCCL: who started the ranks
    export CCL_ATL_TRANSPORT=mpi            # oneCCL: with ofi, calls on GPU buffers are synchronous
    export CCL_KVS_MODE=mpi                 # oneCCL: ranks find each other over MPI
    export CCL_KVS_USE_MPI_RANKS=1          # oneCCL: and keep its numbers
    export CCL_KVS_CONNECTION_TIMEOUT=600   # oneCCL: seconds
    export CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD=1024 # ALCF, oneCCL on Aurora
    export FI_MR_CACHE_MONITOR=userfaultfd  # libfabric, fi_mr(3)
    export FI_CXI_DEFAULT_CQ_SIZE=1048576   # libfabric, fi_cxi(7)
    if [ -n "${SAFE:-}" ]; then
        export CCL_OP_SYNC=1 CCL_ATL_SYNC_COLL=1 # oneCCL: the host waits for each call; ALCF, against hangs of large jobs
    fi
    # MPICH: whether it is given buffers on GPUs. cocodiff gives it none, oneCCL does where CCL_ATL_HMEM=1 says so.
    export MPIR_CVAR_ENABLE_GPU=${CCL_ATL_HMEM:-0} # MPICH, oneCCL
    export TMPDIR=/tmp                      # unix(7): the path of a socket has at most 107 letters
}

# Every rank sees all tiles and takes that of its local rank (torch.xpu.set_device, in cocodiff). So no wrapper such as
# gpu_tile_compact.sh, which hides tiles from ranks.
set_tiles() {
    export ZE_FLAT_DEVICE_HIERARCHY=FLAT  # Level Zero: each tile is a device
    unset ZE_AFFINITY_MASK                # Level Zero: the devices a process sees
    export ZES_ENABLE_SYSMAN=1            # Level Zero: lets free memory be asked for
}

check_venv() {
    [ -z "${DRY_RUN:-}" ] || return 0
    [ -x "$VENV/bin/cocodiff" ] || fail "no cocodiff in $VENV: make the environment as docs/aurora.md says, or set VENV"
    # The machine's own MPI must be the one that mpi4py finds.
    if [ "$LAUNCHER" = pals ] && "$VENV/bin/pip" show -q impi-rt 2>/dev/null; then
        fail "impi-rt of PyPI is in $VENV, mpi4py would take it for this machine's MPI: $VENV/bin/pip uninstall impi-rt"
    fi
}

# Where ranks meet: the first node's address on the fast network.
set_meeting() {
    [ -n "${HSN_SUFFIX:-}" ] || return 0
    local first=FIRST_NODE
    [ ! -e "$HOSTFILE" ] || first=$(head -n 1 "$HOSTFILE")
    export MASTER_ADDR=${first%%.*}$HSN_SUFFIX  # torch.distributed
}

# A command once on each node.
on_each_node() {
    case $LAUNCHER in
        pals) run mpiexec --pmi=pmix --envall --hostfile "$HOSTFILE" -n "$NODES" --ppn 1 "$@" ;;
        hydra) run mpiexec -f "$HOSTFILE" -n "$NODES" -ppn 1 "$@" ;;
        srun) run srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 "$@" ;;
        emulate) run "$@" ;; # all nodes are this host
    esac
}

# One copy of the weights on each node's own storage, in a new folder that goes when the job ends. MODEL becomes the copy.
# Nothing else is ever removed, and nothing that lies there already is added to. Weights in SCRATCH are used where they are.
stage_weights() {
    [ -n "${WEIGHTS:-}" ] || return 0
    [ -n "${DRY_RUN:-}" ] || [ -d "$WEIGHTS" ] || fail "no folder $WEIGHTS: set WEIGHTS to a model in diffusers' layout"
    [ -n "${SCRATCH:-}" ] || fail "SCRATCH is empty: name a folder of each node for a copy of $WEIGHTS"
    if [[ $(realpath -m -- "$WEIGHTS")/ == "$(realpath -m -- "$SCRATCH")"/* ]]; then
        MODEL=$WEIGHTS
        on_each_node test -d "$MODEL" || fail "$MODEL lies in SCRATCH=$SCRATCH but not on every node: copy it to all of them"
        return 0
    fi
    # The number is drawn here, so that the folder has one name on all nodes and nobody else can have made it.
    local job=${PBS_JOBID:-${SLURM_JOB_ID:-$$}} drawn
    drawn=$(od -An -N8 -tx8 /dev/urandom)
    STAGED=$SCRATCH/cocodiff-${job//[^A-Za-z0-9_.-]/_}-${drawn// /}
    MODEL=$STAGED/$(basename -- "$WEIGHTS")
    on_each_node mkdir -p -- "$SCRATCH"
    if [ -z "${DRY_RUN:-}" ]; then
        trap 'on_each_node rm -rf -- "$STAGED" || echo "$0: $STAGED may be left on some node: remove it" >&2' EXIT
    fi
    on_each_node mkdir -m 700 -- "$STAGED" "$MODEL"
    # A downloaded model may be a folder of links into another one, which are followed, and hold more than the parts that
    # its index names, such as each part once more in another format.
    local index=model_index.json named
    # shellcheck disable=SC2046 # names are words
    mapfile -t named < <(exec 2>/dev/null && CDPATH='' cd -- "$WEIGHTS" &&
        ls -d $index $(grep -oE '"\w+" *: *\[' $index | cut -d '"' -f 2))
    [ ${#named[@]} -gt 0 ] || named=(.)
    # Where MPI cannot send them, each node reads them itself, which takes longer.
    [ "$NODES" -gt "${READERS:-4}" ] && [[ $LAUNCHER = pals || $LAUNCHER = hydra ]] &&
        on_each_node "$VENV/bin/python" -m mpi4py launch/stage.py "$WEIGHTS" "$MODEL" "${named[@]}" && return
    on_each_node cp -rL -- "${named[@]/#/"$WEIGHTS/"}" "$MODEL"
}

# cocodiff with these words, on all ranks. Sources of the flags: PALS' mpiexec(1) and ALCF's guide to running jobs; Intel MPI's
# developer reference and MPICH's Hydra page; Slurm's srun(1) and PyTorch's page on torchrun.
start_ranks() {
    local ranks=$((NODES * RANKS_PER_NODE)) more=() bind=()
    # python -m would import what lies in the working folder, such as a random.py.
    local torchrun='import sys; sys.path.pop(0); from torch.distributed.run import main; main()'
    read -r -a more <<<"${MPIEXEC_FLAGS:-}"
    if [ -n "${CPU_BIND:-}" ]; then bind=("--cpu-bind=verbose,list:$CPU_BIND"); fi
    case $LAUNCHER in
        pals)
            export COCODIFF_RANKS=$ranks # cocodiff: PALS tells a rank how many there are on its node alone
            export MPIEXEC_FLAGS="${MPIEXEC_FLAGS:-}" # doctor starts jobs of its own
            run mpiexec --pmi=pmix --envall --line-buffer -n "$ranks" --ppn "$RANKS_PER_NODE" --hostfile "$HOSTFILE" \
                ${bind[@]+"${bind[@]}"} ${more[@]+"${more[@]}"} "$VENV/bin/cocodiff" "$@"
            ;;
        hydra)
            run mpiexec -genvall -n "$ranks" -ppn "$RANKS_PER_NODE" -f "$HOSTFILE" ${more[@]+"${more[@]}"} \
                "$VENV/bin/cocodiff" "$@"
            ;;
        srun)
            run srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 ${more[@]+"${more[@]}"} \
                "$VENV/bin/python" -c "$torchrun" --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE" \
                --rdzv-backend=c10d --rdzv-endpoint="$MEETING" --rdzv-id="${SLURM_JOB_ID:-job}" \
                --no-python "$VENV/bin/cocodiff" "$@"
            ;;
        emulate) run "$VENV/bin/cocodiff" emulate --machine "$MACHINE" --nodes "$NODES" --scale "$SCALE" -- cocodiff "$@" ;;
        *) fail "LAUNCHER=$LAUNCHER: choose pals, hydra, srun or emulate" ;;
    esac
}

# How many nodes a PBS job has; outside of one, what its script asks for.
count_pbs_nodes() {
    HOSTFILE=${PBS_NODEFILE:-PBS_NODEFILE}
    if [ -e "$HOSTFILE" ]; then
        NODES=$(sort -u "$HOSTFILE" | wc -l)
    elif [ -z "${NODES:-}" ]; then
        NODES=$(sed -n 's/^#PBS -l select=\([0-9]*\).*/\1/p' "$0")
    fi
}

# What all jobs do first: set up the environment, and let doctor check the machine. ON is how ranks are started there, MODEL
# the weights' copy.
prepare() {
    ON=(--machine "$MACHINE" --device "$DEVICE" ${TRANSPORT:+--transport "$TRANSPORT"})
    MODEL=
    set +u # modules read variables that are not set
    load_modules
    set -u
    set_proxies
    export HF_HUB_OFFLINE=1 # huggingface_hub: nothing is looked up on the network, by none of many ranks
    if [ "$LAUNCHER" = pals ]; then set_oneccl; fi
    if [ "$DEVICE" = xpu ]; then set_tiles; fi
    set_meeting
    check_venv
    stage_weights
    start_ranks doctor "${ON[@]}" --out "$1" --overwrite
    if [ -n "${FAST:-}" ] && [ -z "${SAFE:-}" ] && grep -qs '"CCL_OP_SYNC=0": "right"' "$1/doctor.json"; then
        export CCL_OP_SYNC=0 # oneCCL: calls do not wait for their end
    fi
}

# Restores the slices.
restore() {
    local again=--overwrite
    if [ -n "${RESUME:-}" ]; then again=--resume; fi
    prepare "$OUT-doctor"
    start_ranks inpaint --input "${INPUT[@]}" --mask "${MASK[@]}" --preset "${PRESET[@]}" --steps "$STEPS" \
        "${ON[@]}" ${MODEL:+--model "$MODEL"} --out "$OUT" "$again"
}
