#!/usr/bin/env bash
# Runs every test of tests/gpu on the GPU of this machine, the most important first, within eight minutes.
#
#     tests/gpu/kit.sh [--device cuda|cpu] [--section NAME]...
#
# One line tells of each section as soon as it ends. Logs and figures.jsonl lie in $OUT (./gpu-results if it is not set).
# Packages that this machine lacks are taken from ./gpu-wheels, which `make gpu-wheels` fills where a registry is.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
device=cuda
chosen=()
while [ $# -gt 0 ]; do
	case $1 in
	--device) device=$2 ;;
	--section) chosen+=("$2") ;;
	*) echo "kit.sh: --device and --section take a value, got $1" >&2; exit 2 ;;
	esac
	shift 2
done
# sections and the seconds that each may take
sections=(ddp:90 copies:80 pipeline:40 checkpointing:40 divided:60 others:50 launch:60 plan:40)
export OUT=${OUT:-$PWD/gpu-results}
mkdir -p "$OUT"
export PYTHONPATH=$PWD/src
if [ -d gpu-wheels ] && ! "$PYTHON" -c 'import hypothesis, msgspec, psutil, pytest, rich, safetensors, tyro' 2> /dev/null; then
	"$PYTHON" -m pip install --quiet --no-deps --no-index --target "$OUT/../gpu-packages" gpu-wheels/*.whl || exit 2
	export PYTHONPATH=$PYTHONPATH:$OUT/../gpu-packages
fi
"$PYTHON" -m compileall -q src tests
failed=0
for section in "${sections[@]}"; do
	name=${section%%:*}
	limit_s=${section##*:}
	if [ ${#chosen[@]} -gt 0 ] && [[ " ${chosen[*]} " != *" $name "* ]]; then
		continue
	fi
	began=$SECONDS
	timeout --kill-after=5 "$limit_s" "$PYTHON" -m pytest -q -s -p no:cacheprovider "tests/gpu/test_gpu_$name.py" \
		--device "$device" > "$OUT/$name.log" 2>&1
	code=$?
	[ $code -eq 0 ] || failed=1
	summary=$(grep -E '^(=+ )?[0-9]+ (passed|failed|error|skipped)' "$OUT/$name.log" | tail -1 | tr -d '=')
	[ $code -ne 124 ] || summary="stopped after its $limit_s s"
	printf '%-14s %-4s %3d s  %s\n' "$name" "$([ $code -eq 0 ] && echo ok || echo FAIL)" $((SECONDS - began)) "$summary"
done
exit $failed
