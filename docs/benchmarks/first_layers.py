"""Makes a draft model, the first N layers of a GGUF file: `python docs/benchmarks/first_layers.py IN.gguf OUT.gguf N`.

In the project's own environment, which has gguf. The layers keep the file's integers.
"""

import sys

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def main() -> None:
    """Write the file."""
    source, destination, count = sys.argv[1:]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(destination, architecture)
    for key, field in reader.fields.items():
        kind = field.types[0] if field.types else None
        if kind is None or key.startswith("GGUF.") or key == "general.architecture":
            continue  # the writer's own
        value = int(count) if key == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(key, value, kind, field.types[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "0"
        if int(layer) < int(count):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
