//! docs/coverage.md: how proxy mode serves each entry point, written from the table.

use mpsshim_proto::table::{self, Class, EXPORT_ONLY, TABLE};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Classes in the order of the document, with what they mean to a program.
const CLASSES: [(Class, &str, &str); 5] = [
    (
        Class::Local,
        "local",
        "Answered in the program's own process.",
    ),
    (
        Class::Post,
        "post",
        "Written to the ring; the call returns without waiting for the server.",
    ),
    (
        Class::Ask,
        "ask",
        "Written to the ring; the call waits for the server's answer.",
    ),
    (
        Class::Custom,
        "custom",
        "Has a message body or a way of its own (launches, copies, images, waits).",
    ),
    (
        Class::Absent,
        "absent",
        "Returns `CUDA_ERROR_NOT_SUPPORTED` in proxy mode and is logged once.",
    ),
];

/// Why an entry point is absent: the first row that fits the beginning of its name. `=` asks for the whole name.
#[rustfmt::skip]
const REASONS: &[(&str, &str)] = &[
    ("cuGL", "graphics interop: needs the program's own context"),
    ("cuEGL", "graphics interop: needs the program's own context"),
    ("cuVDPAU", "graphics interop: needs the program's own context"),
    ("cuGraphics", "graphics interop: needs the program's own context"),
    ("cuGraphExternalSemaphores", "external memory and semaphores: need the program's own context"),
    ("cuGraphAddExternalSemaphores", "external memory and semaphores: need the program's own context"),
    ("cuGraphExecExternalSemaphores", "external memory and semaphores: need the program's own context"),
    ("cuMemMapArray", "sparse arrays: no program that was tried asks for it"),
    ("cuMemBatchDecompress", "needs a decompression engine, which no device at hand has"),
    ("=cuMemGetAttribute", "undocumented"),
    ("=cuMemGetAttribute_v2", "undocumented"),
    ("cuMulticast", "NVLink multicast: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED reads 0, so that libraries do without"),
    ("cuImportExternal", "external memory and semaphores: need the program's own context"),
    ("cuExternalMemory", "external memory and semaphores: need the program's own context"),
    ("cuDestroyExternal", "external memory and semaphores: need the program's own context"),
    ("cuSignalExternal", "external memory and semaphores: need the program's own context"),
    ("cuWaitExternal", "external memory and semaphores: need the program's own context"),
    ("cuCheckpoint", "checkpoints: the device's state is the server's"),
    ("cudbg", "debugging: the context is the server's"),
];

fn reason(name: &str) -> &'static str {
    let fits = |pattern: &str| match pattern.strip_prefix('=') {
        Some(whole) => name == whole,
        None => name.starts_with(pattern),
    };
    REASONS
        .iter()
        .find(|(pattern, _)| fits(pattern))
        .map_or("not served yet", |(_, reason)| reason)
}

/// 12040 as 12.4.
fn version(since: u32) -> String {
    if since == EXPORT_ONLY {
        "export only".into()
    } else {
        format!("{}.{}", since / 1000, since % 1000 / 10)
    }
}

struct Name {
    class: Class,
    versions: Vec<String>,
    symbols: Vec<&'static str>,
}

fn names() -> BTreeMap<&'static str, Name> {
    let mut names = BTreeMap::new();
    for row in TABLE {
        let name = names.entry(row.name).or_insert_with(|| Name {
            class: row.class,
            versions: Vec::new(),
            symbols: Vec::new(),
        });
        name.versions.push(version(row.since));
        for symbol in [row.legacy, row.per_thread].into_iter().flatten() {
            if !name.symbols.contains(&symbol) {
                name.symbols.push(symbol);
            }
        }
    }
    names
}

fn markdown() -> String {
    let names = names();
    let of = |class: Class| names.iter().filter(move |(_, name)| name.class == class);
    let mut text = format!(
        "# Coverage\n\n\
         Generated from the table in `proto/src/table` and `proto/src/classes.rs`; \
         `UPDATE_DOCS=1 cargo test -p mpsshim-proto --test coverage` rewrites it.\n\n\
         How proxy mode serves the CUDA driver's {} entry points ({} exported symbols, up to CUDA {}). Without a \
         daemon, or with `MPSSHIM_DISABLE=1`, every one of them reaches the genuine driver.\n\n\
         | class | entry points | symbols | meaning |\n|---|---|---|---|\n",
        names.len(),
        table::symbols().len(),
        version(table::CUDA_VERSION),
    );
    for (class, title, meaning) in CLASSES {
        let symbols: usize = of(class).map(|(_, name)| name.symbols.len()).sum();
        let _ = writeln!(
            text,
            "| {title} | {} | {symbols} | {meaning} |",
            of(class).count()
        );
    }
    for (class, title, _) in CLASSES {
        if of(class).next().is_none() {
            continue;
        }
        let last = if class == Class::Absent {
            "why"
        } else {
            "symbols"
        };
        let _ = write!(
            text,
            "\n## {title}\n\n| entry point | since CUDA | {last} |\n|---|---|---|\n"
        );
        for (name, entry) in of(class) {
            let last = if class == Class::Absent {
                reason(name).to_owned()
            } else {
                entry.symbols.join(", ")
            };
            let _ = writeln!(text, "| {name} | {} | {last} |", entry.versions.join(", "));
        }
    }
    text
}

#[test]
fn coverage_md_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/coverage.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, markdown()).expect("write docs/coverage.md");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == markdown(),
        "docs/coverage.md differs from the table: run UPDATE_DOCS=1 cargo test -p mpsshim-proto --test coverage"
    );
}

/// A row that no entry point needs hides a change of the table.
#[test]
fn every_reason_fits_an_entry_point() {
    for (pattern, reason) in REASONS {
        let fits = TABLE.iter().any(|row| match pattern.strip_prefix('=') {
            Some(whole) => row.name == whole,
            None => row.name.starts_with(pattern),
        });
        assert!(fits, "{pattern}: {reason}");
    }
}
