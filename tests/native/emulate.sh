#!/usr/bin/env bash
# Runs the AVX-512 kernels over SIMDe's portable intrinsics and the NEON kernels under qemu, and compares their
# digests with those of this machine's own instruction sets. Needs: apt-get install libsimde-dev
# g++-aarch64-linux-gnu qemu-user.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$(dirname "$($PY -c 'import sys; print(sys.executable)')"):$PATH"
common=(-GNinja -DOFFLOAD_PYTHON=OFF -DOFFLOAD_DIGEST=ON)

build() {  # name, cmake options ...
  local name=$1
  shift
  cmake -S kernels -B "build/emulate/$name" "${common[@]}" "$@" > "build/emulate/$name.log"
  cmake --build "build/emulate/$name" >> "build/emulate/$name.log" || { tail -20 "build/emulate/$name.log"; exit 1; }
}

mkdir -p build/emulate
build native
build avx512 -DOFFLOAD_EMULATE_AVX512=ON
build neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
# Each exits with 1 when what it can see alone is wrong; digests of different programs are compared below.
run() {
  "$@" || { echo "emulate: FAILED: $*" >&2; exit 1; }
}
lines=$(
  run build/emulate/native/digest
  run build/emulate/avx512/digest
  run qemu-aarch64 -L /usr/aarch64-linux-gnu build/emulate/neon/digest
) || { echo "$lines"; exit 1; }
echo "$lines" | sort -u
for name in avx512 neon; do
  grep -q "^$name " <<< "$lines" || { echo "emulate: $name did not run"; exit 1; }
done
if [ "$(grep -v '^check:' <<< "$lines" | cut -d' ' -f2 | sort -u | wc -l)" != 1 ]; then
  echo "emulate: FAILED, the instruction sets differ"
  exit 1
fi
echo "emulate: all instruction sets give the same bits"
