"""A compiler of HIP units whose code objects carry the assembler's listing of their instructions.

    python listed_clang.py CLANG... -- ARGUMENTS...

Where llvm-objdump is missing, the emulator reads the instructions from the section that this adds (listing.py). Runs
by itself, in a plain interpreter: it imports nothing of the project. Compiles with ``-S``, lets the assembler print
each instruction with its encoding, and assembles and links the same text with the listing as a section beside it.
Whatever is no compilation to a code object is passed on to clang.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECTION = ".tilewright.listing"
OTHER_OUTPUTS = ("-S", "-c", "-E", "-fsyntax-only", "-emit-llvm", "-###")


def main(argv: list[str]) -> int:
    """Compile. Returns the exit code of the step that failed, or zero."""
    at = argv.index("--")
    clang, arguments = argv[:at], argv[at + 1 :]
    archs = [word.partition("=")[2] for word in arguments if word.startswith("--offload-arch=")]
    if not archs or "-o" not in arguments or any(word in OTHER_OUTPUTS for word in arguments):
        os.execv(clang[0], [*clang, *arguments])
    place = arguments.index("-o")
    output, rest = arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    text, listing, arch = f"{output}.s", f"{output}.lst", archs[0]
    assemble = ["-cc1as", "-triple", "amdgcn-amd-amdhsa", "-target-cpu", arch, "-filetype", "asm", "-show-encoding"]
    link = ["--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    assembler = [word for word in clang if not word.startswith("-B")]
    try:
        if code := subprocess.call([*clang, *rest, "-S", "-o", text]):
            return code
        if code := subprocess.call([*assembler, *assemble, text, "-o", listing]):
            return code
        with Path(text).open("a", encoding="utf-8") as file:
            file.write(f'\n\t.section\t{SECTION},"",@progbits\n\t.incbin\t"{listing}"\n')
        return subprocess.call([*clang, *link, text, "-o", output])
    finally:
        for path in (text, listing):
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
