"""Reading of untrusted files with limits, and atomic writing.

All other packages open, parse, unpack and print untrusted data through this one.
"""

from mezzo.files._archive import ArchiveEntry, read_entry, stored_parts, unpack
from mezzo.files._bounds import MAX_UNPACKED, WEIGHTS, Bounds, too_large, unpacked_limit
from mezzo.files._errors import FileError
from mezzo.files._json import parse_json, read_json
from mezzo.files._lock import LOCK, FolderInUse, folder_lock, is_alive, locked
from mezzo.files._manifest import MANIFEST, check_manifest, write_manifest
from mezzo.files._pickles import PlainUnpickler, UnsafePickle, empty_dict, encode, rebuild_tree, report_bad_pickle
from mezzo.files._plain import one_line, plain, say, short_repr
from mezzo.files._read import MiB, check_regular, is_regular, open_regular, read_bytes, read_text, shown_path
from mezzo.files._tree import Scalar, SourceMark, YamlNode, mark_all
from mezzo.files._write import flush, flush_tree, report_write_errors, write_file, write_text
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
    "rebuild_tree",
    "report_bad_pickle",
    "encode",
    "empty_dict",
    # Writing
    "write_file",
    "write_text",
    "report_write_errors",
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
