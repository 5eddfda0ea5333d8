#!/usr/bin/env bash
# A first quarter of an hour on one GPU, the most valuable first. In the project's root:
#
#     bash benchmarks/first_run.sh 1        is it right, and how fast is SmolLM-1.7B: 4 minutes
#     bash benchmarks/first_run.sh 2        other models, and other ways to train: 4 minutes
#     DEVICE=cpu SCALE=4 bash benchmarks/first_run.sh 1        only to see that all stages run
#
# Each stage has a limit, and those after it run whatever it did. What is known is in
# $OUT/summary.txt at any moment; $OUT is first_run/ if it is not set.
set -u
PART=${1:?1 or 2}
OUT=$(realpath -m "${OUT:-first_run}")
export DEVICE=${DEVICE:-cuda} OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
[ "$DEVICE" = cuda ] || export OMP_NUM_THREADS=1  # other processes may use the cores
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
SCALE=${SCALE:-1}  # of all limits
END=$((SECONDS + 245 * SCALE))
mkdir -p "$OUT"

note() { echo "$*" | tee -a "$OUT/summary.txt"; }

# stage NAME SECONDS COMMAND...: its output goes to $OUT/NAME.txt
stage() {
    local name=$1 limit=$(($2 * SCALE)) began=$SECONDS left=$((END - SECONDS))
    shift 2
    touch "$OUT/$name.txt"
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        note "--- $name: left out, no time"
        return
    fi
    timeout -k 5 "$limit" "$@" >>"$OUT/$name.txt" 2>&1
    note "--- $name: exit code $?, $((SECONDS - began)) s"  # 124: it was cut off
}

# bench NAME SECONDS PRESET OPTIONS...: rows of benchmarks/gpu.py, also cut-off ones
bench() {
    local name=$1 limit=$2 preset=$3
    shift 3
    if [ "$DEVICE" = cpu ]; then
        set -- --presets tiny --device cpu --steps 2 --sizes 1 --only picotron-min
    else
        set -- --presets "$preset" --steps 5 "$@"
    fi
    stage "$name" "$limit" python3 benchmarks/gpu.py --json "$OUT/$name.json" "$@"
    sed -n '/ms a step/,$p' "$OUT/$name.txt" | grep -E 'ms a step|alone|picotron|transformers' |
        sed "s/^/$preset  /" | tee -a "$OUT/summary.txt"
}

# variant NAME SECONDS KEYS: a run of train.py with these keys of the config, as JSON
variant() {
    stage "train-$1" "$2" python3 benchmarks/short_run.py "$1" "$3"
    grep -E '^(trained|[A-Za-z]*Error)' "$OUT/train-$1.txt" | sed "s/^/$1  /" | tee -a "$OUT/summary.txt"
}

part_1() {
    note "$(date -Is) $(git log -1 --format=%h 2>/dev/null)"
    command -v nvidia-smi >/dev/null &&
        note "$(nvidia-smi --query-gpu=name,memory.total,power.limit --format=csv,noheader)"
    stage probe 60 python3 benchmarks/probe.py
    cat "$OUT/probe.txt" >>"$OUT/summary.txt"
    # Nothing of these is timed, so they run at once.
    # By name: to collect all tests takes a part of the time.
    stage tests 120 python3 -m pytest -m gpu -n 0 -p no:cacheprovider --tb short \
        --continue-on-collection-errors $(grep -rl --include='test_*.py' 'mark\.gpu' tests) &
    variant plain 100 '{}' &
    wait
    grep -E '^(FAILED|ERROR)|passed|failed|skipped' "$OUT/tests.txt" | tail -25 |
        tee -a "$OUT/summary.txt"
    variant resumed 60 '{}'  # from the checkpoint of plain
    bench SmolLM-1.7B 150 SmolLM-1.7B --sizes 4 --profile "$OUT/traces"
}

part_2() {
    bench Llama-1B 90 Llama-3.2-1B-8k --sizes 2
    bench Qwen3 60 Qwen3-0.6B-8k --sizes 2 4 --only picotron-min "picotron-min compiled"
    variant compiled 60 '{"model": {"compile": true}}'
    variant fp8 60 '{"model": {"compile": true, "fp8": true}}'
    variant documents 40 '{"dataset": {"document_mask": true}}'
    variant full 40 '{"model": {"recompute": "full"}}'
    local layers=$([ "$DEVICE" = cpu ] && echo 3 || echo 20)
    variant offload 40 '{"model": {"recompute": "full", "offload": '"$layers"'}}'
    variant experts 40 '{"model": {"num_local_experts": 8, "moe_intermediate_size": 512}}'
    variant experts-fp8 40 '{"model": {"num_local_experts": 8, "moe_intermediate_size": 512,
        "fp8_experts": true}}'
    variant shared 60 '{"distributed": {"pp_size": 2, "backend": "gloo"},
        "training": {"gradient_accumulation_steps": 4}}'
    bench SmolLM-360M 60 SmolLM-360M --sizes 16
}

"part_$PART"
note "in all: $SECONDS s"
