//! The one table of driver entry points.
//!
//! A row says which exported symbol serves a base name from which CUDA version on, for either flavour of the
//! default stream; [`crate::classes`] says how proxy mode serves it. The exported symbols of the shim, its
//! `cuGetProcAddress` answers, the opcodes and the server's dispatch derive from here. `driver-api.csv` is what
//! the genuine driver of CUDA 13.0 answered; a test holds the rows and that file equal.

mod rows;

use std::sync::LazyLock;

use crate::classes::CLASSES;

/// The newest CUDA version the table knows entry points of: 1000 * major + 10 * minor.
pub const CUDA_VERSION: u32 = 13000;

/// [`EntryPoint::since`] of a symbol that the driver exports but that `cuGetProcAddress` never gives out.
pub const EXPORT_ONLY: u32 = u32::MAX;

/// Every entry point, ordered as `driver-api.csv`: by base name, then by version.
pub static TABLE: &[EntryPoint] = rows::ROWS;

/// How proxy mode serves a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Class {
    /// Answered in the client.
    Local = 1,
    /// Written to the ring; no answer is awaited.
    Post = 2,
    /// Written to the ring; the call waits for the answer.
    Ask = 3,
    /// Has a message body or a way of its own.
    Custom = 4,
    /// Not served: `CUDA_ERROR_NOT_SUPPORTED`.
    Absent = 5,
}

/// One row: which symbol serves a base name from one CUDA version on, until the next row of that name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryPoint {
    /// Base name, what a program gives to `cuGetProcAddress`.
    pub name: &'static str,
    /// First CUDA version of this row (1000 * major + 10 * minor), or [`EXPORT_ONLY`].
    pub since: u32,
    /// Exported symbol with the legacy default stream.
    pub legacy: Option<&'static str>,
    /// Exported symbol with the per-thread default stream; the legacy one where no stream is involved.
    pub per_thread: Option<&'static str>,
    /// How proxy mode serves it.
    pub class: Class,
}

/// What [`lookup`] found.
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

/// The class of an exported symbol.
pub fn symbol_class(symbol: &str) -> Option<Class> {
    symbol_index(symbol).map(|index| SYMBOLS[index].1)
}

static SYMBOLS: LazyLock<Vec<(&'static str, Class)>> = LazyLock::new(|| {
    let mut symbols: Vec<_> = TABLE
        .iter()
        .flat_map(|row| {
            [row.legacy, row.per_thread]
                .into_iter()
                .flatten()
                .map(|symbol| (symbol, row.class))
        })
        .collect();
    symbols.sort_unstable_by_key(|(symbol, _)| *symbol);
    symbols.dedup_by_key(|(symbol, _)| *symbol);
    symbols
});

/// A row as `rows.rs` writes it: "-" stands for no symbol.
const fn row(
    name: &'static str,
    since: u32,
    legacy: &'static str,
    per_thread: &'static str,
) -> EntryPoint {
    EntryPoint {
        name,
        since,
        legacy: symbol(legacy),
        per_thread: symbol(per_thread),
        class: class_of(name),
    }
}

const fn symbol(cell: &'static str) -> Option<&'static str> {
    if same(cell, "-") { None } else { Some(cell) }
}

const fn class_of(name: &str) -> Class {
    let mut i = 0;
    while i < CLASSES.len() {
        if same(CLASSES[i].0, name) {
            return CLASSES[i].1;
        }
        i += 1;
    }
    Class::Absent
}

/// `a == b`, which the language does not have for strings in constants.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    // Names of one length differ near their end more often than near "cu".
    let mut i = a.len();
    while i > 0 {
        i -= 1;
        if a[i] != b[i] {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn every_classified_name_exists_once() {
        for (i, (name, _)) in CLASSES.iter().enumerate() {
            assert!(
                !rows_of(name).is_empty(),
                "{name} is classified but not in the table"
            );
            assert!(
                CLASSES[..i].iter().all(|(other, _)| other != name),
                "{name} is classified twice"
            );
        }
        assert_eq!(symbol_class("cuGetProcAddress_v2"), Some(Class::Local));
        assert_eq!(symbol_class("cuGLInit"), Some(Class::Absent));
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
        assert_eq!(symbols().len(), 682);
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
