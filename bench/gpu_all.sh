#!/usr/bin/env bash
# Runs everything that needs a GPU, the most valuable parts first, in as many minutes as you have a GPU.
#
#     bench/gpu_all.sh                     run what is missing, for 14 minutes
#     bench/gpu_all.sh --minutes 30
#     bench/gpu_all.sh --list              show the parts, and which are missing
#
# Each part writes its output to gpu-PART.txt in bench/results (--results FOLDER) with the machine, the versions and the
# command. Some also write gpu-PART.json or gpu-training.jsonl. A part is complete if it ended with exit status 0.
# Start the script again to continue: it runs the parts that have not run yet, then repeats those that are not complete.
# Trainings continue where they stopped. To repeat a complete part, delete its file. No network is needed.
#
# PYTHON is the interpreter. It needs PyTorch, CuPy, greenlet and the packages of the tests. If the library is not
# compiled for it, the script compiles it first. For tests of this script, --run COMMAND runs `COMMAND PART SECONDS`
# instead of each part.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

results=bench/results minutes=14 list="" run=""
python=${PYTHON:-$(command -v python || command -v python3)}
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
while [ $# -gt 0 ]; do
    case $1 in
        --minutes) minutes=${2:?} && shift ;;
        --results) results=${2:?} && shift ;;
        --run) run=${2:?} && shift ;;
        --list) list=1 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
    shift
done

# PART:SECONDS, the most valuable first. After SECONDS a part is interrupted, and writes the results that it has.
parts=(tests:240 sanitizer:120 step-124M:120 step-354M:120 step-985M:150 selection-25.6M:120 selection-110M:120
    selection-1000M:180 kernels:60 patches:60 training-4:600 training-8:600)

# Prints the command of a part ($1) that has $2 seconds.
command_of() {
    local bench="'$python' -m bench.gpu --write build/gpu --name gpu-$1 --parts" training seconds=$(($2 - 60))
    training="--out '$results/gpu-training.jsonl' --minutes $(awk "BEGIN { print $seconds / 60 }")"  # it saves in the rest
    case $1 in
        tests) echo "'$python' -m pytest tests/gpu -q -ra" ;;
        sanitizer) echo "compute-sanitizer --tool memcheck --error-exitcode 1 '$python' -m tests.gpu.every_kernel 5000" ;;
        step-*) echo "$bench step --models ${1#step-}" ;;
        selection-*) local size=${1#selection-} && echo "$bench selection --sizes ${size%M}e6" ;;
        patches) echo "'$python' -m bench.patches speed --device cuda" ;;
        kernels) echo "$bench merging packing others --sizes 25.6e6" ;;
        training-4) echo "'$python' -m bench.gpu_training --ranks 4 --batch 2 $training" ;;
        training-8) echo "'$python' -m bench.gpu_training --ranks 8 --batch 1 --ways sparse $training" ;;
    esac
}

# Prints "complete", "missing", or how a part ended.
state_of() {
    local file=$results/gpu-$1.txt
    if [ "$1" = sanitizer ] && [ -z "$run" ] && ! command -v compute-sanitizer > /dev/null; then
        echo "left out: compute-sanitizer is not installed"
    elif [ ! -e "$file" ]; then
        echo missing
    else
        case $(tail -n 1 "$file") in
            "# exit status 0,"*) echo complete ;;
            "# exit status "*) tail -n 1 "$file" | sed 's/^# /not complete: /' ;;
            *) echo "not complete: interrupted" ;;
        esac
    fi
}

describe_machine() {
    local gpu git
    gpu=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null)
    git=$(git describe --always --dirty --exclude '*' 2> /dev/null)
    echo "# commit ${git:-unknown}"
    echo "# ${gpu:-no nvidia-smi}; $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1), $(nproc) cores"
    "$python" - << 'END'
import importlib.metadata, platform
found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
names = [n for n in sorted(found) if n in ("numpy", "torch", "jax", "mpi4py", "greenlet") or n.startswith("cupy")]
print("#", ", ".join(f"{name} {found[name]}" for name in names) + f", python {platform.python_version()}")
END
}

for part in "${parts[@]}"; do
    name=${part%:*} state=$(state_of "${part%:*}")
    [ -n "$list" ] && printf '%-16s at most %3d s   %s\n' "$name" "${part#*:}" "$state"
    case $state in
        missing) first+=("$part") ;;
        "not complete"*) again+=("$part") ;;
    esac
done
[ -n "$list" ] && exit 0
if [ -z "${first[*]-}${again[*]-}" ]; then
    echo "all parts are complete: see $results" && exit 0
fi

if [ -z "$run" ]; then
    if ! error=$("$python" -c 'import cupy; cupy.cuda.runtime.getDeviceCount()' 2>&1); then
        echo "bench/gpu_all.sh: no GPU can be used: $(tail -n 1 <<< "$error")" >&2 && exit 1
    fi
    if ! "$python" -c 'import sparsecomm' 2> /dev/null; then
        echo "== compile the library" && "$python" setup.py -q build_ext --inplace || exit 1
    fi
    "$python" -c 'import greenlet, hypothesis, pytest, rich, torch' || echo "some parts will fail without this package"
fi

mkdir -p "$results" build/gpu
machine=$(describe_machine) end=$((SECONDS + 60 * minutes)) stop=""
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
for part in ${first[@]+"${first[@]}"} ${again[@]+"${again[@]}"}; do
    name=${part%:*} limit=${part#*:} left=$((end - SECONDS))
    if [ -n "$stop" ] || [ $left -lt 40 ]; then
        echo "== $name: no time left" && continue
    fi
    limit=$((limit < left ? limit : left)) file=$results/gpu-$name.txt started=$SECONDS
    command=$(command_of "$name" "$limit")
    [ -n "$run" ] && command="$run $name $limit"
    echo "== $name, for at most $limit s: $command"
    printf '%s\n' "# $(date -u +%FT%TZ)" "$machine" "# $command" > "$file"
    # An interrupt lets programs write what they have; they must not ignore it, as background jobs do.
    timeout --signal=INT --kill-after=20 "$limit" env --default-signal=INT bash -c "$command" >> "$file" 2>&1 &
    pid=$!
    trap 'stop=1; kill -INT $pid' INT TERM
    wait $pid; status=$?
    while kill -0 $pid 2> /dev/null; do wait $pid; status=$?; done  # a signal has ended the wait
    trap - INT TERM
    case $name in
        training-*) [ -z "$run" ] && "$python" -m bench.gpu_training --report "$results/gpu-training.jsonl" >> "$file" 2>&1 ;;
    esac
    [ -e "build/gpu/gpu-$name.json" ] && mv "build/gpu/gpu-$name.json" "$results/"
    echo "# exit status $status, $((SECONDS - started)) s" >> "$file"
    tail -n 12 "$file"
done
for part in "${parts[@]}"; do
    case $(state_of "${part%:*}") in missing | "not complete"*) exit 3 ;; esac
done
