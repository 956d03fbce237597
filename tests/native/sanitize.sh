#!/usr/bin/env bash
# The native core on builds with sanitizers: the stress program of the I/O engines with ThreadSanitizer, then it and the
# digest program of the kernels with AddressSanitizer and UBSan, then the Python tests marked `kernels` against such a
# copy of the package.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$($PY -c 'import sys; print(sys.executable)')
PATH="$(dirname "$python"):$PATH"
out=$PWD/build/sanitize
mkdir -p "$out"

# ThreadSanitizer sees neither what the kernel writes nor how a ring orders it. Only one thread of ours knows the ring,
# and what goes between threads goes through a mutex; so there is nothing to suppress.
cmake -S kernels -B "$out/threads" -GNinja -DOFFLOAD_SANITIZE_THREADS=ON -DOFFLOAD_IO_STRESS=ON -DOFFLOAD_WERROR=ON \
  -DOFFLOAD_PYTHON=OFF > "$out/log"
cmake --build "$out/threads" >> "$out/log" || { tail -20 "$out/log"; exit 1; }
TSAN_OPTIONS=halt_on_error=1 "$out/threads/io_stress"

cmake -S kernels -B "$out/cmake" -GNinja -DOFFLOAD_SANITIZE=ON -DOFFLOAD_DIGEST=ON -DOFFLOAD_IO_STRESS=ON \
  -DOFFLOAD_WERROR=ON -DPython_EXECUTABLE="$python" >> "$out/log"
cmake --build "$out/cmake" >> "$out/log" || { tail -20 "$out/log"; exit 1; }
"$out/cmake/digest"  # exits with 1 when instruction sets differ, a kernel leaves its range or the team is wrong
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 "$out/cmake/io_stress"

# A package of links to our sources with the sanitized core inside. Started without `site` hooks of the editable
# install: PYTHONPATH adds the environment's packages without reading its .pth files.
rm -rf "$out/package"
mkdir -p "$out/package/offload"
ln -s "$PWD"/offload/* "$out/package/offload/"
cp "$out"/cmake/_native*.so "$out/package/offload/"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$python" -c 'import sys; print(sys._base_executable)')
cd "$out/package"
# detect_leaks: the interpreter and torch keep memory until the end by design; the digest program above checks ours.
# LD_PRELOAD: the sanitizer must come first in a process that was not built with it.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so) $(c++ -print-file-name=libstdc++.so)"
export PYTHONPATH="$out/package:$packages" PYTHONMALLOC=malloc
"$base" -c 'import offload._native as n; assert "sanitize" in n.__file__, n.__file__'
"$base" -m pytest "$OLDPWD/tests" -c "$OLDPWD/pyproject.toml" --rootdir "$OLDPWD" -m kernels -q -x -p no:cacheprovider
echo "sanitize: no report"
