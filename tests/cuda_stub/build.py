"""Builds the pretended CUDA: a library for each that torch's CUDA build needs, with the symbols that its libraries lack.

    .venv-cuda-stub/bin/python tests/cuda_stub/build.py     prints the folder for LD_LIBRARY_PATH

The runtime, the driver and NCCL are the C files beside this one. Of the others (cuBLAS, cuDNN, ...) each function is made here by its name:
it makes a handle, notes the handle's stream, takes a setting, launches a kernel on that stream, or answers that this is not supported.
"""

import hashlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME, DRIVER, NCCL = "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"
UNVERSIONED = {"nccl": NCCL, "cusparseLt": "libcusparseLt.so.0", "nvshmem": "libnvshmem_host.so.3", "cuFile": "libcufile.so.0",
               "cu": DRIVER}  # fmt: skip
"""Libraries of symbols that carry no version, by their first letters; the first that fits."""
SILENT = "libcurand.so.10"
"""Needed, though nothing of it is used."""
NOT_SUPPORTED = {"libcudnn.so.9": 3000, "libcupti.so.13": 27, DRIVER: 801, RUNTIME: 801}
QUIET = ("libcupti.so.13", NCCL, "libnvrtc.so.13", DRIVER, RUNTIME, "libcufile.so.0", "libnvshmem_host.so.3")
"""Libraries whose functions launch nothing."""

FOUND = "typedef struct { int algo, status; float time; size_t memory; int determinism, math, reserved[3]; } found;\n"
WRITTEN = {
    "cublasGetMathMode": "(void *h, int *mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "(void *h, int *mode) { *mode = 0; return 0; }",
    "cublasLtMatmul": "(void *h, void *d, void *alpha, void *a, void *la, void *b, void *lb, void *beta, void *c, void *lc, void *to,"
    " void *lt, void *algorithm, void *space, size_t bytes, void *stream)"
    " { COUNTED; return cuda_stub_library_launch(__func__, stream) ? 15 : 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *result, int *count)"
    " { memset(result, 0, 64); *count = 1; return 0; }",
    "cudnnGetProperty": "(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 24 : 0; return 0; }",
    "cudnnDropoutGetStatesSize": "(void *h, size_t *size) { *size = 1024; return 0; }",
    **{
        f"cudnnGetConvolution{kind}Algorithm_v7": "(void *h, void *a, void *b, void *c, void *d, int n, int *count, found *f)"
        " { memset(f, 0, sizeof *f); f->algo = 1; f->determinism = 1; *count = 1; return 0; }"
        for kind in ("Forward", "BackwardData", "BackwardFilter")
    },
    **{
        f"cudnnGetConvolution{kind}WorkspaceSize": "(void *h, void *a, void *b, void *c, void *d, int n, size_t *size)"
        " { *size = 0; return 0; }"
        for kind in ("Forward", "BackwardData", "BackwardFilter")
    },
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": "(void *h, int m, int o, void *a, void *b, void *c, void *d, void *e,"
    " size_t *size) { *size = 0; return 0; }",
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize": "(void *h, int m, int o, void *a, void *b, void *c, void *d, void *e, void *f,"
    " void *g, size_t *size) { *size = 0; return 0; }",
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize": "(void *h, int m, int o, void *a, void *b, size_t *size)"
    " { *size = 0; return 0; }",
    "ncclGetVersion": "(int *version) { *version = 23007; return 0; }",
    "nvrtcVersion": "(int *major, int *minor) { *major = 13; *minor = 0; return 0; }",
}  # fmt: skip
NUMBERS = {"cudnnGetVersion": 92400, "cudnnGetCudartVersion": 13000, "cublasLtGetVersion": 130000}
TEXTS = re.compile(r"Get\w*String$|GetLastError$")
MAKES = re.compile(r"^(cublas|cublasLt|cudnn|cusparse|cusolverDn)[A-Z]?\w*Create(?!IdentityPermutation)|^cudnnCreate")
SETS = re.compile(r"Set(?!reamW)|Destroy|^nccl(Group|CommDestroy|CommAbort)|^cublasLtMatmulAlgo(Init|Check)")
ASKS = re.compile(r"Get|Size|Find|Version|Backend|Init|analysis|_v8$|Workspace|Estimation")


def needed(libraries: Path) -> dict[str, set[str]]:
    """The libraries that torch needs and its wheel lacks, and the symbols it wants of them."""
    command = ["nm", "-D", "--undefined-only", "--with-symbol-versions", *map(str, sorted(libraries.glob("lib*.so")))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, set[str]] = defaultdict(set)
    for symbol in {line.split()[-1] for line in listed.splitlines() if " U " in line or " w " in line}:
        name, _, version = symbol.partition("@")
        if re.match(r"lib(cu|nv)", version):
            found[version].add(name)
        elif re.match(r"nccl[A-Z]|cusparseLt[A-Z]|nvshmem|cuFile[A-Z]|cu[A-Z]", name):
            found[next(library for start, library in UNVERSIONED.items() if name.startswith(start))].add(name)
    found[SILENT]
    return found


def function(library: str, name: str) -> str:
    """A function of C that stands for `name`."""
    refusal = NOT_SUPPORTED.get(library, 15)
    if name in WRITTEN:
        return f"int {name}{WRITTEN[name]}\n"
    if name in NUMBERS:
        return f"size_t {name}(void) {{ return {NUMBERS[name]}; }}\n"
    if TEXTS.search(name):
        return f'const char *{name}(int status) {{ return "a status of the stub"; }}\n'
    if "SetStream" in name:
        return f"int {name}(void **handle, void *stream) {{ *handle = stream; return 0; }}\n"
    if MAKES.search(name):
        return f"int {name}(void **made) {{ *made = calloc(1, 512); return 0; }}\n"
    if SETS.search(name):
        return f"int {name}(void) {{ return 0; }}\n"
    if library in QUIET or ASKS.search(name):
        return f"int {name}(void) {{ return {refusal}; }}\n"
    return f"int {name}(void **handle) {{ COUNTED; return cuda_stub_library_launch(__func__, *handle) ? {refusal} : 0; }}\n"


def build(torch: Path, headers: Path, folder: Path) -> None:
    """Builds all libraries for the torch in that folder. Raises CalledProcessError where a compiler or nm fails."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = needed(torch / "lib")
    written = {RUNTIME: ["device.c", "cudart.c", "cudart_work.c"], DRIVER: ["driver.c"], NCCL: ["nccl.c"]}
    for library in sorted(wanted, key=lambda name: name != RUNTIME):
        sources = [HERE / name for name in written.get(library, [])]
        there = "".join(source.read_text() for source in sources)
        missing = sorted(name for name in wanted[library] if not re.search(rf"\b{name}\(", there))
        made = folder / f"{library}.c"
        functions = "".join(function(library, name) for name in missing)
        made.write_text(f'#include "device.h"\n#include <stdlib.h>\n#include <string.h>\n{FOUND}{functions}')
        command = ["gcc", "-O1", "-g", "-w", "-fno-builtin", "-shared", "-fPIC", f"-I{HERE}", f"-I{headers}", str(made), *map(str, sources),
                   "-o", str(folder / library), f"-Wl,-soname,{library}", "-lpthread"]  # fmt: skip
        if library != RUNTIME:
            command.append(str(folder / RUNTIME))
        if library not in (*UNVERSIONED.values(), SILENT):
            script = folder / f"{library}.map"
            script.write_text(f"{library} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        elif "nvshmem" in library:
            script = folder / f"{library}.map"
            script.write_text("NVSHMEM { global: *; };\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True, timeout=300)


def digest(torch: Path) -> str:
    """Says for which sources, and which torch, libraries were built."""
    parts = [*sorted(HERE.glob("*.[ch]")), Path(__file__), torch / "version.py"]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def main() -> None:
    packages = next(Path(path) for path in sys.path if (Path(path) / "torch" / "version.py").exists())
    folder = Path(sys.prefix) / "cuda_stub"
    stamp, wanted = folder / "built", digest(packages / "torch")
    if not stamp.exists() or stamp.read_text() != wanted:
        build(packages / "torch", Path(sys.prefix) / "headers" / "nvidia" / "cu13" / "include", folder)
        stamp.write_text(wanted)
    print(folder)


if __name__ == "__main__":
    main()
