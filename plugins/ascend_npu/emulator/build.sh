#!/usr/bin/env bash
# Build the emulator with g++:  PYTHON=python3 ./build.sh [folder]
# KEEP=1 keeps the objects and compiles only changed sources; touch the sources that include a changed header.
# PYTHON is an environment with torch and torch-npu. The build imports neither of them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-$here/build}" && cd "${1:-$here/build}" && pwd)
python=${PYTHON:-python3}
site() { TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -c "import importlib.util as u; print(u.find_spec('$1').submodule_search_locations[0])"; }
torch=$(site torch)
wheel=$(site torch_npu)
mkdir -p "$out/objects"

flags=(-std=c++20 -O1 -fPIC -Wall -Wno-unknown-pragmas -Wno-array-bounds -isystem "$torch/include"
       -isystem "$torch/include/torch/csrc/api/include")
cp "$here/operators/aten.h" "$out/objects/aten.h"
[ -n "${KEEP:-}" ] && [ -e "$out/objects/aten.h.gch" ] || g++ "${flags[@]}" -x c++-header "$out/objects/aten.h" -o "$out/objects/aten.h.gch"
compile() {
    local object=$out/objects/$(basename "$1" .cpp).o
    if [ -n "${KEEP:-}" ] && [ "$object" -nt "$1" ]; then return; fi
    local torch_headers=()
    if [[ $1 == */operators/* ]]; then torch_headers=(-include "$out/objects/aten.h"); fi
    g++ "${flags[@]}" "${torch_headers[@]}" -c "$1" -o "$object"
}
find "$here/runtime" "$here/operators" -name '*.cpp' -print0 | sort -z > "$out/objects/sources"
export -f compile; export out here
flags_text=$(printf '%q ' "${flags[@]}") && export flags_text
xargs -0 -P "$(nproc)" -I{} bash -c 'eval "flags=($flags_text)"; compile {}' < "$out/objects/sources"

link() {  # link NAME OBJECTS… : link one shared library in the output folder
    local name=$1; shift
    g++ -shared -o "$out/$name" -Wl,-soname,"$name" -Wl,-rpath,'$ORIGIN' -Wl,--no-as-needed "$@"
}
objects() { for source in "$here/$1"/*.cpp; do echo "$out/objects/$(basename "$source" .cpp).o"; done; }

# A function that the wheel needs and the emulator lacks becomes a function that aborts with its own name.
mapfile -t runtime < <(objects runtime)
nm --defined-only "${runtime[@]}" | awk 'NF == 3 { print $3 }' | sort -u > "$out/objects/defined"
for library in "$wheel"/lib/lib*.so "$wheel"/_C*.so; do nm -D --undefined-only "$library"; done |
    awk '$1 == "U" { print $2 }' | grep -E '^(acl|rt[A-Z]|Msprof|Hccl|Hcom)' | sort -u > "$out/objects/wanted"
{
    echo 'extern "C" void emulatorMissing(const char*);'
    comm -13 "$out/objects/defined" "$out/objects/wanted" | while read -r name; do
        echo "extern \"C\" __attribute__((visibility(\"default\"))) void $name() { emulatorMissing(\"$name\"); }"
    done
} > "$out/objects/generated_stubs.cpp"
g++ "${flags[@]}" -c "$out/objects/generated_stubs.cpp" -o "$out/objects/generated_stubs.o"

link libascendcl.so "${runtime[@]}" "$out/objects/generated_stubs.o" -L"$torch/lib" -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib"
for name in libacl_op_compiler libacl_tdt_channel libge_runner libgraph libhccl; do
    link "$name.so" -L"$out" -lascendcl
done
mapfile -t operators < <(objects operators)
link libopapi.so "${operators[@]}" -L"$out" -lascendcl -L"$torch/lib" -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib"
link libnnopbase.so -L"$out" -lopapi

# Variants of the libraries with functions hidden, for tests of the plugin without them. A variant's folder goes first in
# LD_LIBRARY_PATH.
without() {  # without FOLDER LIBRARY 'SYMBOLS;' LINK…
    local folder=$out/variants/$1 library=$2 symbols=$3; shift 3
    mkdir -p "$folder"
    echo "{ local: $symbols };" > "$out/objects/hidden.map"
    g++ -shared -o "$folder/$library" -Wl,-soname,"$library" -Wl,--version-script="$out/objects/hidden.map" -Wl,--no-as-needed "$@"
}
from_runtime=("${runtime[@]}" "$out/objects/generated_stubs.o" -L"$torch/lib" -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib")
without no-external-events libascendcl.so 'aclrtValueWait; aclrtValueWrite;' "${from_runtime[@]}"
without unmarked libascendcl.so 'draftmarkEmulatorVersion;' "${from_runtime[@]}"
without no-v3 libopapi.so 'aclnnFusedInferAttentionScoreV3*;' "${operators[@]}" -L"$out" -lascendcl -L"$torch/lib" -ltorch_cpu -lc10 \
    -Wl,-rpath,"$out" -Wl,-rpath,"$torch/lib"

# Folders that torch_npu searches, and a script that sets their paths, as in an installation of CANN.
mkdir -p "$out/opp" "$out/runtime" "$out/compiler"
cat > "$out/set_env.sh" <<END
export ASCEND_HOME_PATH=$out ASCEND_OPP_PATH=$out/opp LD_LIBRARY_PATH=$out\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0  # keep torch from importing torch_npu by itself
export ASCEND_GLOBAL_LOG_LEVEL=2        # with warnings the emulator learns which operator torch_npu did not find
END
[ -n "${KEEP:-}" ] || rm -rf "$out/objects"
echo "built in $out"
