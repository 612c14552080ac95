"""Makes FOLDER/q8_0.gguf and FOLDER/q4_0.gguf of a GGUF file: `python docs/benchmarks/requantize.py IN.gguf FOLDER`.

Needs llama-cpp-python. From the wheel's Q4_1 file, so that both engines are given the same files.
"""

import sys

import llama_cpp

TYPES = (("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0))


def main() -> None:
    """Write both files."""
    source, folder = sys.argv[1], sys.argv[2]
    for name, file_type in TYPES:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = file_type, True
        if llama_cpp.llama_model_quantize(source.encode(), f"{folder}/{name}.gguf".encode(), params):
            sys.exit(f"llama.cpp could not make {name}")


if __name__ == "__main__":
    main()
