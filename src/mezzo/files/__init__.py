"""Files that come from outside, and files that must survive: read with limits, written whole or not at all.

Every other package opens, parses, unpacks and prints foreign data through this one.
"""

from mezzo.files._archive import ArchiveEntry, read_entry, stored_parts, unpack
from mezzo.files._bounds import MAX_UNPACKED, WEIGHTS, Bounds, too_large, unpacked_limit
from mezzo.files._errors import FileError
from mezzo.files._json import parse_json, read_json
from mezzo.files._lock import LOCK, FolderInUse, folder_lock, is_alive, locked
from mezzo.files._manifest import MANIFEST, check_manifest, write_manifest
from mezzo.files._pickles import PlainUnpickler, UnsafePickle, encode, explained_pickle, no_items, rebuilt
from mezzo.files._plain import one_line, plain, say, short_repr
from mezzo.files._read import MiB, check_regular, is_regular, open_regular, read_bytes, read_text, shown_path
from mezzo.files._tree import Scalar, SourceMark, YamlNode, mark_all
from mezzo.files._write import explained, flush, flush_tree, write_file, write_text
from mezzo.files._yaml import MAX_DEPTH, parse_yaml, read_yaml

__all__ = [
    # Reading
    "open_regular",
    "read_bytes",
    "read_text",
    "is_regular",
    "check_regular",
    "MiB",
    "FileError",
    # Formats
    "parse_json",
    "read_json",
    "parse_yaml",
    "read_yaml",
    "MAX_DEPTH",
    "YamlNode",
    "SourceMark",
    "Scalar",
    "mark_all",
    "short_repr",
    # Archives
    "unpack",
    "read_entry",
    "stored_parts",
    "ArchiveEntry",
    "Bounds",
    "WEIGHTS",
    "MAX_UNPACKED",
    "unpacked_limit",
    "too_large",
    # Pickles
    "PlainUnpickler",
    "UnsafePickle",
    "rebuilt",
    "explained_pickle",
    "encode",
    "no_items",
    # Writing
    "write_file",
    "write_text",
    "explained",
    "flush",
    "flush_tree",
    # Between processes, and after a fault
    "locked",
    "folder_lock",
    "FolderInUse",
    "is_alive",
    "LOCK",
    "write_manifest",
    "check_manifest",
    "MANIFEST",
    # Printing
    "plain",
    "one_line",
    "shown_path",
    "say",
]
