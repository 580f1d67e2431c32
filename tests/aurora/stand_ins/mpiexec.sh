# Starts $RANKS ranks that see the variables of PALS alone, on the CPU.
while [[ $1 == -* ]]; do
    case $1 in
        -n) ranks=$2 ;;
        --ppn) each=$2 ;;
        --hostfile) [ -e "$2" ] || { echo "mpiexec: no file $2" >&2; exit 1; } ;;
        --pmi=pmix | --envall | --line-buffer | --cpu-bind=verbose,list:*) set -- "" "$@" ;;
        *) echo "mpiexec: $1?" >&2; exit 1 ;;
    esac
    shift 2
done
[ "${each:-}" != 1 ] || exec "$@"
[ "${COCODIFF_RANKS:-$ranks}" = "$ranks" ] || { echo "$ranks ranks are told $COCODIFF_RANKS" >&2; exit 1; }
words=("$TESTS"/pals_rank.py ${COCODIFF_RANKS:+COCODIFF_RANKS=$RANKS} ${PBS_NODEFILE:+PBS_NODEFILE=$PBS_NODEFILE})
for word in "${@:2}"; do
    case $word in aurora) word=local ;; xpu) word=cpu ;; xccl) word=gloo ;; esac
    words+=("$word")
done
words=("$MPIEXEC" -n $RANKS "$(dirname "$(command -v "$1")")/python" "${words[@]}")
env -u PBS_NODEFILE -u PBS_JOBID I_MPI_FABRICS=shm "${words[@]}" &>"$TOP/ranks" # Hydra would follow a job's variables
code=$?
cat "$TOP/ranks"
[ -n "${PBS_JOBID:-}" ] || exit $code
echo "$code $2: $(tail -n 1 "$TOP/ranks")" >>"$TOP/started"
