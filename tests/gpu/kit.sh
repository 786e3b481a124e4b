#!/usr/bin/env bash
# Runs every test of tests/gpu on the GPU of this machine, the most important first, within eight minutes.
#
#     tests/gpu/kit.sh [--device cuda|cpu] [--section NAME]...
#
# One line tells of each section as soon as it ends. Logs and figures.jsonl lie in $OUT (./gpu-results if it is not set).
# A failure is in the log as soon as its test ends. A test that hangs fails a few seconds before the end of its section,
# and the log has the stacks of all threads, also of the ranks in the pool.
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
# sections and the seconds that each may take; together they get no more than KIT_S
KIT_S=${KIT_S:-480}
sections=(
	ddp:60
	copies:50
	pipeline:50
	checkpointing:40
	divided:60
	others:50
	elastic:90
	launch:80
	plan:40
	nccl:90
	rpc:50
	train:220
	cores:100
)
export OUT=${OUT:-$PWD/gpu-results}
mkdir -p "$OUT"
packages=$OUT/../gpu-packages
export PYTHONPATH=$PWD/src:$packages
imports='import hypothesis, msgspec, psutil, pytest, rich, safetensors, tyro'
if [ -d gpu-wheels ] && ! "$PYTHON" -c "$imports" 2> /dev/null; then
	( # several kits may share the folder: the first one fills it
		flock 9
		"$PYTHON" -c "$imports" 2> /dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check \
			--root-user-action=ignore --no-deps --no-index --upgrade --target "$packages" gpu-wheels/*.whl
	) 9> "$OUT/../gpu-packages.lock" || exit 2
fi
"$PYTHON" -m compileall -q src tests
failed=0
for section in "${sections[@]}"; do
	name=${section%%:*}
	limit_s=${section##*:}
	if [ ${#chosen[@]} -gt 0 ] && [[ " ${chosen[*]} " != *" $name "* ]]; then
		continue
	fi
	[ $((KIT_S - SECONDS)) -ge "$limit_s" ] || limit_s=$((KIT_S - SECONDS))
	if [ "$limit_s" -lt 15 ]; then
		printf '%-14s %-4s %3d s  %s\n' "$name" FAIL 0 "not run: the kit's $KIT_S s are over"
		failed=1
		continue
	fi
	began=$SECONDS
	# SIGABRT prints the stacks of pytest's threads, even where the interpreter's lock is never released
	SECTION_ENDS_S=$(($(date +%s) + limit_s)) timeout --signal=ABRT --kill-after=5 "$limit_s" \
		"$PYTHON" -m pytest -q -s -p no:cacheprovider -o "faulthandler_timeout=$((limit_s - 3))" \
		"tests/gpu/test_gpu_$name.py" --device "$device" > "$OUT/$name.log" 2>&1
	code=$?
	[ $code -eq 0 ] || failed=1
	summary=$(grep -E '^(=+ )?[0-9]+ (passed|failed|error|skipped)' "$OUT/$name.log" | tail -1 | tr -d '=')
	[ $code -ne 124 ] || summary="stopped after its $limit_s s"
	printf '%-14s %-4s %3d s  %s\n' "$name" "$([ $code -eq 0 ] && echo ok || echo FAIL)" $((SECONDS - began)) "$summary"
done
exit $failed
