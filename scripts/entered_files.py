"""Lists the files of src that one whole LL dispatch enters on GPUs: gdb steps through the call.

    NCCL_EP_ARCHS=90 cargo build -p nccl-ep && make simt-programs
    . scripts/env.sh; export NCCLEP_HOSTSIM_WITH_GPU=1 LD_LIBRARY_PATH=target/debug
    gdb -q -batch -x scripts/entered_files.py --args target/c/simt/host_path ll
"""

from pathlib import Path

import gdb

CALL = "nccl_ep_core::session::handle::Handle::dispatch"
# The first calls make what later ones reuse.
SKIPPED_CALLS = 10


def entered() -> dict[str, set[str]]:
    """The files below src that run until the call returns, each with its functions."""
    source = Path.cwd() / "src"
    caller = gdb.selected_frame().older()
    found: dict[str, set[str]] = {}
    while gdb.selected_frame() != caller:
        frame = gdb.selected_frame()
        table = frame.find_sal().symtab
        path = Path(table.fullname()) if table else Path()
        if path.is_relative_to(source):
            found.setdefault(str(path.relative_to(source.parent)), set()).add(str(frame.name()))
        gdb.execute("step", to_string=True)
    return found


gdb.execute("set breakpoint pending on")
gdb.execute("set pagination off")
gdb.execute(f"break {CALL}")
gdb.execute(f"ignore 1 {SKIPPED_CALLS}")
gdb.execute("run", to_string=True)
files = entered()
for number, (file, functions) in enumerate(sorted(files.items()), start=1):
    names = sorted({name.split("<")[0].split("::")[-1] for name in functions})
    print(f"{number:3} {file}: {', '.join(names)}")
gdb.execute("set confirm off")
gdb.execute("kill")
