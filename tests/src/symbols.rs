//! What a library or program gives the loader.

use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;

/// What the library exports besides the driver's symbols: functions of the C library that it interposes, and its version.
pub const INTERPOSED: &[&str] = &[
    "__pread64_chk",
    "__pread_chk",
    "__read_chk",
    "__recv_chk",
    "dlopen",
    "fread",
    "fwrite",
    "getrandom",
    "madvise",
    "mpsshim_version",
    "mremap",
    "pread",
    "pread64",
    "preadv",
    "preadv64",
    "pthread_sigmask",
    "pwrite",
    "pwrite64",
    "pwritev",
    "pwritev64",
    "read",
    "readv",
    "recv",
    "recvfrom",
    "recvmsg",
    "send",
    "sendmsg",
    "sendto",
    "sigaction",
    "signal",
    "sigprocmask",
    "write",
    "writev",
];

/// The names of all that an ELF file exports.
pub fn exported(file: &[u8]) -> BTreeSet<String> {
    let file = object::File::parse(file).expect("ELF");
    file.dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .map(|symbol| symbol.name().expect("name").to_owned())
        .collect()
}
