//! docs/coverage.md: how proxy mode serves each entry point, written from the table.

use mpsshim_api::table::{self, Class, EXPORT_ONLY, TABLE};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// A part of the document: its title, its meaning for a program, and a predicate for the classes in it.
type Part = (&'static str, &'static str, fn(Class) -> bool);

const PARTS: [Part; 6] = [
    ("local", "Answered in the program's own process.", |class| {
        class == Class::Local
    }),
    (
        "genuine",
        "The genuine driver's own function, called in the program's process: it needs no context.",
        |class| class == Class::Genuine,
    ),
    (
        "async",
        "Written to the ring; the call returns without waiting for the server.",
        |class| class == Class::Async,
    ),
    (
        "request",
        "Written to the ring; the call waits for the server's answer.",
        |class| class == Class::Request,
    ),
    (
        "custom",
        "Has a message body or a way of its own (launches, copies, images, waits).",
        |class| class == Class::Custom,
    ),
    (
        "absent",
        "Returns `CUDA_ERROR_NOT_SUPPORTED` in proxy mode and is logged once.",
        |class| matches!(class, Class::Absent(_)),
    ),
];

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
    let of = |within: fn(Class) -> bool| names.iter().filter(move |(_, name)| within(name.class));
    let mut text = format!(
        "# Coverage\n\n\
         Generated from the table in `api/src/table/rows.rs`; \
         `UPDATE_DOCS=1 cargo test -p mpsshim-api --test coverage` rewrites it.\n\n\
         How proxy mode serves the CUDA driver's {} entry points ({} exported symbols, up to CUDA {}). Without a \
         daemon, or with `MPSSHIM_DISABLE=1`, every one of them reaches the genuine driver.\n\n\
         | class | entry points | symbols | meaning |\n|---|---|---|---|\n",
        names.len(),
        table::symbols().len(),
        version(table::CUDA_VERSION),
    );
    for (title, meaning, within) in PARTS {
        let symbols: usize = of(within).map(|(_, name)| name.symbols.len()).sum();
        let _ = writeln!(
            text,
            "| {title} | {} | {symbols} | {meaning} |",
            of(within).count()
        );
    }
    for (title, _, within) in PARTS {
        if of(within).next().is_none() {
            continue;
        }
        let last = match title {
            "absent" => "why",
            _ => "symbols",
        };
        let _ = write!(
            text,
            "\n## {title}\n\n| entry point | since CUDA | {last} |\n|---|---|---|\n"
        );
        for (name, entry) in of(within) {
            let last = match entry.class {
                Class::Absent(reason) => reason.text().to_owned(),
                _ => entry.symbols.join(", "),
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
        "docs/coverage.md differs from the table: run UPDATE_DOCS=1 cargo test -p mpsshim-api --test coverage"
    );
}
