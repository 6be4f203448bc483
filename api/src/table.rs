//! The table of driver entry points: each is declared once, with all facts that other parts need.
//!
//! A row of [`rows`] lists for a base name the exported symbols that serve it, from which CUDA version on, for either
//! flavour of the default stream; the class in which proxy mode serves it; whether it submits work to the device; and
//! whether it works in a forked child. The exported symbols of the shim, its `cuGetProcAddress` answers, direct mode's
//! gate and docs/coverage.md derive from here. `driver-api.csv` lists the answers of the genuine driver of CUDA 13.0; a
//! test compares the rows with that file.

mod rows;

use rows::for_each_entry_point;
use std::sync::LazyLock;

/// The newest CUDA version the table knows entry points of: 1000 * major + 10 * minor.
pub const CUDA_VERSION: u32 = 13000;

/// [`EntryPoint::since`] of a symbol that the driver exports but that `cuGetProcAddress` never gives out.
pub const EXPORT_ONLY: u32 = u32::MAX;

macro_rules! symbol {
    (-) => {
        None
    };
    ($symbol:ident) => {
        Some(stringify!($symbol))
    };
}

macro_rules! per_thread {
    ($legacy:tt) => {
        symbol!($legacy)
    };
    ($legacy:tt $per_thread:tt) => {
        symbol!($per_thread)
    };
}

macro_rules! class {
    ([$class:ident($reason:ident) $($work:ident)+]) => {
        Class::$class(Reason::$reason)
    };
    ([$class:ident $($work:ident)+]) => {
        Class::$class
    };
}

macro_rules! submits {
    ([$class:ident $(($reason:ident))? submits $($after_fork:ident)?]) => {
        true
    };
    ([$class:ident $(($reason:ident))? idle $($after_fork:ident)?]) => {
        false
    };
}

macro_rules! after_fork {
    ([$class:ident $(($reason:ident))? $work:ident after_fork]) => {
        true
    };
    ([$class:ident $(($reason:ident))? $work:ident]) => {
        false
    };
}

macro_rules! table {
    ($($name:ident: $facts:tt { $($since:tt: $legacy:tt $(/ $per_thread:tt)?),+ })*) => {
        /// Every entry point, ordered as `driver-api.csv`: by base name, then by version.
        pub static TABLE: &[EntryPoint] = &[$($(EntryPoint {
            name: stringify!($name),
            since: $since,
            legacy: symbol!($legacy),
            per_thread: per_thread!($legacy $($per_thread)?),
            class: class!($facts),
            submits: submits!($facts),
            after_fork: after_fork!($facts),
        },)+)*];
    };
}

for_each_entry_point!(table);

/// How proxy mode serves a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// Answered in the client.
    Local,
    /// The genuine driver's own function, in the client: it needs no context.
    Genuine,
    /// Written to the ring; no answer is awaited.
    Async,
    /// Written to the ring; the call waits for the answer.
    Request,
    /// Has a message body or a way of its own.
    Custom,
    /// Not served: `CUDA_ERROR_NOT_SUPPORTED`.
    Absent(Reason),
}

/// Why proxy mode does not serve a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reason {
    /// Graphics interop.
    Graphics,
    /// External memory and semaphores.
    External,
    /// Sparse arrays.
    SparseArrays,
    /// Decompression by the device.
    Decompression,
    /// The driver's header does not have it.
    Undocumented,
    /// NVLink multicast.
    Multicast,
    /// Checkpoints.
    Checkpoints,
    /// Debugging.
    Debugging,
}

impl Reason {
    /// Description for users.
    pub fn text(self) -> &'static str {
        match self {
            Reason::Graphics => "graphics interop: needs the program's own context",
            Reason::External => "external memory and semaphores: need the program's own context",
            Reason::SparseArrays => "sparse arrays: no program that was tried asks for it",
            Reason::Decompression => "needs a decompression engine, which no device at hand has",
            Reason::Undocumented => "undocumented",
            Reason::Multicast => {
                "NVLink multicast: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED reads 0, so that libraries do without"
            }
            Reason::Checkpoints => "checkpoints: the device's state is the server's",
            Reason::Debugging => "debugging: the context is the server's",
        }
    }
}

/// One row: the symbol that serves a base name from one CUDA version on, until the next row of that name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryPoint {
    /// Base name, as a program passes it to `cuGetProcAddress`.
    pub name: &'static str,
    /// First CUDA version of this row (1000 * major + 10 * minor), or [`EXPORT_ONLY`].
    pub since: u32,
    /// Exported symbol with the legacy default stream.
    pub legacy: Option<&'static str>,
    /// Exported symbol with the per-thread default stream; the legacy one where no stream is involved.
    pub per_thread: Option<&'static str>,
    /// How proxy mode serves it. All versions and default-stream flavours of a call go the same way.
    pub class: Class,
    /// Whether it submits work to the device, or something that waits for the device: in direct mode it needs the
    /// client's turn.
    pub submits: bool,
    /// Whether it works in a forked child: it uses neither device nor session.
    pub after_fork: bool,
}

/// Result of [`lookup`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// The exported symbol that serves the name.
    Found(&'static str),
    /// No entry point has this name.
    NotFound,
    /// The name exists, but only from a later CUDA version on.
    VersionNotSufficient,
}

/// The symbol that serves `name` for a program built against `cuda_version`, as `cuGetProcAddress` finds it.
pub fn lookup(name: &str, cuda_version: u32, per_thread: bool) -> Lookup {
    let served = || rows_of(name).iter().filter(|row| row.since != EXPORT_ONLY);
    let symbol = |row: &EntryPoint| {
        if per_thread {
            row.per_thread
        } else {
            row.legacy
        }
    };
    match served()
        .rev()
        .find(|row| row.since <= cuda_version)
        .and_then(symbol)
    {
        Some(symbol) => Lookup::Found(symbol),
        None if served().any(|row| symbol(row).is_some()) => Lookup::VersionNotSufficient,
        None => Lookup::NotFound,
    }
}

/// All rows of one base name, by ascending version; empty when there is no such name.
pub fn rows_of(name: &str) -> &'static [EntryPoint] {
    static ORDER: LazyLock<Vec<(&'static str, usize, usize)>> = LazyLock::new(|| {
        let mut order = Vec::new();
        let mut start = 0;
        for rows in TABLE.chunk_by(|a, b| a.name == b.name) {
            order.push((rows[0].name, start, start + rows.len()));
            start += rows.len();
        }
        order.sort_unstable();
        order
    });
    match ORDER.binary_search_by(|(candidate, ..)| (*candidate).cmp(name)) {
        Ok(found) => {
            let (_, start, end) = ORDER[found];
            &TABLE[start..end]
        }
        Err(_) => &[],
    }
}

/// Every exported symbol once, in ascending byte order.
pub fn symbols() -> impl ExactSizeIterator<Item = &'static str> + Clone {
    SYMBOLS.iter().map(|(symbol, _)| *symbol)
}

/// The place of `symbol` in [`symbols`].
pub fn symbol_index(symbol: &str) -> Option<usize> {
    SYMBOLS
        .binary_search_by(|(candidate, _)| (*candidate).cmp(symbol))
        .ok()
}

/// The table's row of an exported symbol.
pub fn entry_point(symbol: &str) -> Option<&'static EntryPoint> {
    symbol_index(symbol).map(|index| SYMBOLS[index].1)
}

/// Whether an exported symbol submits work to the device.
pub fn submits(symbol: &str) -> bool {
    entry_point(symbol).is_some_and(|row| row.submits)
}

/// Whether proxy mode leaves an exported symbol to the genuine driver.
pub fn is_genuine(symbol: &str) -> bool {
    entry_point(symbol).is_some_and(|row| row.class == Class::Genuine)
}

/// Whether an exported symbol works in a forked child. Safe to call there, because it takes no lock.
pub fn works_after_fork(symbol: &str) -> bool {
    let mut rows = AFTER_FORK.iter();
    rows.any(|row| row.legacy == Some(symbol) || row.per_thread == Some(symbol))
}

static AFTER_FORK: [&EntryPoint; count_after_fork()] = {
    let mut all = [&TABLE[0]; count_after_fork()];
    let (mut next, mut row) = (0, 0);
    while row < TABLE.len() {
        if TABLE[row].after_fork {
            all[next] = &TABLE[row];
            next += 1;
        }
        row += 1;
    }
    all
};

const fn count_after_fork() -> usize {
    let (mut count, mut row) = (0, 0);
    while row < TABLE.len() {
        count += TABLE[row].after_fork as usize;
        row += 1;
    }
    count
}

static SYMBOLS: LazyLock<Vec<(&'static str, &'static EntryPoint)>> = LazyLock::new(|| {
    let symbols_of = |row: &'static EntryPoint| {
        let symbols = [row.legacy, row.per_thread].into_iter().flatten();
        symbols.map(move |symbol| (symbol, row))
    };
    let mut symbols: Vec<_> = TABLE.iter().flat_map(symbols_of).collect();
    symbols.sort_by_key(|(symbol, _)| *symbol);
    symbols.dedup_by_key(|(symbol, _)| *symbol);
    symbols
});

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The rows of `driver-api.csv`.
    fn csv() -> impl Iterator<Item = [&'static str; 4]> {
        include_str!("../driver-api.csv")
            .lines()
            .skip(1)
            .map(|line| {
                let cells: Vec<_> = line.split(',').collect();
                cells
                    .try_into()
                    .unwrap_or_else(|cells| panic!("not four cells: {cells:?}"))
            })
    }

    #[test]
    fn table_and_csv_are_equal() {
        let mut rows = TABLE.iter();
        for [name, since, legacy, per_thread] in csv() {
            let row = rows.next().expect("the csv has more rows than the table");
            assert_eq!(row.name, name);
            assert_eq!(
                row.since,
                if since.is_empty() {
                    EXPORT_ONLY
                } else {
                    since.parse().unwrap()
                },
                "{name}"
            );
            assert_eq!(row.legacy.unwrap_or("-"), legacy, "{name} {since}");
            assert_eq!(row.per_thread.unwrap_or("-"), per_thread, "{name} {since}");
        }
        assert_eq!(rows.next(), None, "the table has more rows than the csv");
    }

    #[test]
    fn rows_of_a_name_stand_together_and_ascend() {
        for row in TABLE {
            let rows = rows_of(row.name);
            assert_eq!(
                rows.len(),
                TABLE.iter().filter(|other| other.name == row.name).count(),
                "{}",
                row.name
            );
            assert!(rows.is_sorted_by(|a, b| a.since < b.since), "{}", row.name);
        }
        assert!(rows_of("cuNoSuchCall").is_empty());
    }

    #[test]
    fn versions_of_the_table_are_known() {
        let newest = TABLE
            .iter()
            .map(|row| row.since)
            .filter(|&since| since != EXPORT_ONLY)
            .max();
        assert_eq!(newest, Some(CUDA_VERSION));
    }

    #[test]
    fn a_symbol_has_the_facts_of_its_name() {
        let class = |symbol| entry_point(symbol).map(|row| row.class);
        assert_eq!(class("cuGetProcAddress_v2"), Some(Class::Local));
        assert_eq!(class("cuGLInit"), Some(Class::Absent(Reason::Graphics)));
        assert_eq!(class("cuNoSuchCall"), None);
    }

    #[test]
    fn errors_have_names_after_a_fork() {
        for symbol in ["cuGetErrorName", "cuGetProcAddress", "cuGetProcAddress_v2"] {
            assert!(works_after_fork(symbol), "{symbol}");
        }
        for symbol in ["cuInit", "cuMemAlloc_v2", "cuNoSuchCall"] {
            assert!(!works_after_fork(symbol), "{symbol}");
        }
    }

    #[test]
    fn launches_copies_and_memory_in_stream_order_submit() {
        for symbol in [
            "cuLaunchKernel",
            "cuLaunchKernel_ptsz",
            "cuMemcpyHtoD_v2",
            "cuMemcpyHtoDAsync_v2_ptsz",
            "cuMemAllocAsync",
            "cuGraphLaunch",
        ] {
            assert!(submits(symbol), "{symbol}");
        }
        for symbol in [
            "cuMemAlloc_v2",
            "cuCtxSynchronize",
            "cuEventRecord",
            "cuNoSuchCall",
        ] {
            assert!(!submits(symbol), "{symbol}");
        }
    }

    #[test]
    fn each_symbol_belongs_to_one_name() {
        for symbol in symbols() {
            let mut owners: Vec<_> = TABLE
                .iter()
                .filter(|row| row.legacy == Some(symbol) || row.per_thread == Some(symbol))
                .map(|row| row.name)
                .collect();
            owners.dedup();
            assert_eq!(owners.len(), 1, "{symbol} serves {owners:?}");
        }
    }

    #[test]
    fn symbols_are_sorted_and_indexed() {
        let all: BTreeSet<_> = csv()
            .flat_map(|[_, _, legacy, per_thread]| [legacy, per_thread])
            .filter(|symbol| *symbol != "-")
            .collect();
        assert!(symbols().eq(all));
        assert!(symbols().is_sorted_by(|a, b| a < b));
        for (index, symbol) in symbols().enumerate() {
            assert_eq!(symbol_index(symbol), Some(index));
        }
        assert_eq!(symbol_index("cuNoSuchCall"), None);
    }

    #[test]
    fn lookup_takes_the_newest_row_that_the_version_allows() {
        assert_eq!(
            lookup("cuMemcpyHtoD", 2000, false),
            Lookup::Found("cuMemcpyHtoD")
        );
        assert_eq!(
            lookup("cuMemcpyHtoD", 3020, false),
            Lookup::Found("cuMemcpyHtoD_v2")
        );
        assert_eq!(
            lookup("cuMemcpyHtoD", 13000, false),
            Lookup::Found("cuMemcpyHtoD_v2")
        );
        assert_eq!(
            lookup("cuMemcpyHtoD", 13000, true),
            Lookup::Found("cuMemcpyHtoD_v2_ptds")
        );
        assert_eq!(
            lookup("cuCtxCreate", 11040, true),
            Lookup::Found("cuCtxCreate_v3")
        );
        assert_eq!(
            lookup("cuCtxCreate", 99999, false),
            Lookup::Found("cuCtxCreate_v4")
        );
    }

    #[test]
    fn lookup_tells_unknown_from_too_early() {
        assert_eq!(
            lookup("cuLibraryLoadData", 11080, false),
            Lookup::VersionNotSufficient
        );
        assert_eq!(
            lookup("cuMemcpyHtoD", 6050, true),
            Lookup::VersionNotSufficient
        );
        assert_eq!(
            lookup("cuMemcpyHtoD", 0, false),
            Lookup::VersionNotSufficient
        );
        assert_eq!(lookup("cuNoSuchCall", 13000, false), Lookup::NotFound);
        assert_eq!(lookup("", 13000, false), Lookup::NotFound);
        // Base names only, and nothing that is merely exported.
        assert_eq!(lookup("cuMemcpyHtoD_v2", 13000, false), Lookup::NotFound);
        assert_eq!(lookup("cudbgMain", u32::MAX, false), Lookup::NotFound);
    }
}
