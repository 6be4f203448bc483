//! Every command that the documents for users name, taken out of them and run on softgpu; what cannot be is in
//! `pages/elsewhere.rs`, with the test that does it instead or the reason why none does.

use crate::pages::elsewhere::ELSEWHERE;
use crate::pages::lines::{commands, is_done_elsewhere};
use crate::pages::reader::Reader;
use crate::pages::{In, Page, for_users, root, target};
use mpsshim_api::cuda::{CUresult, result_name};
use mpsshim_control::commands::TABLE;
use mpsshim_tests::artifacts::artifact;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn every_command_works() {
    let pages = for_users();
    let (mut used, mut wrong) = (BTreeSet::new(), Vec::new());
    let mut reader = Reader::default();
    for page in &pages {
        for line in commands(page) {
            used.extend(line.row.map(|(page, key, _)| (*page, *key)));
            let result = match is_done_elsewhere(&line) {
                Ok(false) => reader.run(&line),
                other => other.map(drop),
            };
            wrong.extend(result.err());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (page, key, _) in ELSEWHERE {
        let there = used.contains(&(*page, *key));
        assert!(
            there,
            "{page} no longer has `{key}`: strike it out of ELSEWHERE"
        );
    }
    assert!(reader.count > 80, "only {} commands were run", reader.count);
}

#[test]
fn the_lists_of_commands_and_options_are_whole() {
    let page = Page::read("docs/operations.md");
    let listed: BTreeSet<&str> = page
        .pieces
        .iter()
        .filter(|piece| piece.section == "mps-control" && piece.place == In::Column(0))
        .filter_map(|piece| piece.text.split(' ').next())
        .collect();
    let told = Command::new(artifact("mps-control")).arg("--help").output();
    let told = String::from_utf8(told.expect("run").stdout).expect("text");
    let heads = told.lines().map(str::trim).filter(|line| {
        // Below it are the commands' own.
        line.starts_with("--") || line.starts_with('-') && line.contains(", --")
    });
    let options: BTreeSet<&str> = heads
        .filter_map(|line| line.split([' ', ',']).find(|word| word.starts_with("--")))
        .collect();
    assert!(options.len() > 5, "{told}");
    let missing: Vec<_> = options
        .into_iter()
        .filter(|option| !listed.contains(option) && *option != "--help")
        .collect();
    assert!(missing.is_empty(), "not in docs/operations.md: {missing:?}");
    let known: BTreeSet<&str> = TABLE.iter().map(|row| row.name).collect();
    let missing: Vec<_> = known.difference(&listed).collect();
    assert!(missing.is_empty(), "not in docs/operations.md: {missing:?}");
}

#[test]
fn what_documents_name_is_there() {
    let pages = for_users();
    let settings = Page::read("docs/settings.md");
    let mut known: BTreeSet<&str> = BTreeSet::new();
    for row in settings
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("| "))
    {
        known.extend(row.split(' ').next());
    }
    // Of the tests and of scripts/images.sh, of no program.
    known.extend(["MPSSHIM_TEST_DRIVER", "MPSSHIM_TAG"]);
    // NVIDIA's own, of which documents say what becomes of them.
    known.extend([
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    ]);
    let mut wrong = Vec::new();
    for page in &pages {
        let name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        for word in page.text.split(|letter| !name(letter)) {
            let ours = ["MPSSHIM_", "CUDA_MPS_"]
                .iter()
                .any(|start| word.len() > start.len() && word.starts_with(start));
            if ours && !known.contains(word) {
                wrong.push(format!("{}: there is no setting {word}", page.name));
            }
        }
        for link in page.links.iter().filter(|link| !link.contains("://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = match path {
                "" => page.name.clone(),
                _ => target(&page.name, path),
            };
            let there = root().join(&path).exists();
            if !there || !anchor.is_empty() && !Page::read(&path).anchors.contains(anchor) {
                wrong.push(format!("{}: {link} leads nowhere", page.name));
            }
        }
    }
    // A page that is in no list is found by nobody.
    let list = Page::read("docs/README.md");
    let listed: BTreeSet<String> = list
        .links
        .iter()
        .map(|link| target("docs/README.md", link.split('#').next().unwrap_or(link)))
        .collect();
    for entry in fs::read_dir(root().join("docs")).expect("docs") {
        let name = entry.expect("entry").file_name();
        let path = format!("docs/{}", name.to_str().expect("text"));
        if path.ends_with(".md") && path != "docs/README.md" && !listed.contains(&path) {
            wrong.push(format!("{path} is not in docs/README.md"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Crates that the Cargo.toml files of the packages name, the project's own aside.
fn dependencies() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(root()).expect("the project") {
        let path = entry.expect("entry").path().join("Cargo.toml");
        let Ok(text) = fs::read_to_string(path) else {
            continue;
        };
        let mut listed = false;
        for line in text.lines() {
            if line.starts_with('[') {
                listed = line.ends_with("dependencies]");
            } else if listed && line.starts_with(|letter: char| letter.is_ascii_lowercase()) {
                all.extend(line.split([' ', '.', '=']).next().map(str::to_owned));
            }
        }
    }
    all.retain(|name| !name.starts_with("mpsshim-"));
    all
}

#[test]
fn every_dependency_is_documented() {
    let page = Page::read("docs/dependencies.md");
    let rows = page.text.lines().filter_map(|line| line.strip_prefix("| "));
    let mut documented: BTreeSet<String> = rows
        .filter_map(|row| row.split(' ').next())
        .map(str::to_owned)
        .collect();
    // The header, and the crate that std has replaced.
    for row in ["crate", "once_cell"] {
        assert!(documented.remove(row), "no row {row}");
    }
    let used = dependencies();
    assert!(used.len() > 40, "{used:?}");
    let missing: Vec<_> = used.difference(&documented).collect();
    assert!(
        missing.is_empty(),
        "not in docs/dependencies.md: {missing:?}"
    );
    let stale: Vec<_> = documented.difference(&used).collect();
    assert!(
        stale.is_empty(),
        "docs/dependencies.md has what is not used: {stale:?}"
    );
}

/// Statuses that a text names.
fn statuses(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    words
        .filter(|word| word.starts_with("CUDA_ERROR_"))
        .collect()
}

fn sources(folder: &Path, all: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            // Statuses in unit tests are those of a driver of the test's.
            let product = text.split_once("#[cfg(test)]\nmod tests");
            *all += product.map_or(&text[..], |(product, _)| product);
        }
    }
}

#[test]
fn every_status_is_explained() {
    let page = Page::read("docs/troubleshooting.md");
    // What library and server name, they return, or do something about.
    let mut source = String::new();
    for folder in ["shim/src", "server/src"] {
        sources(&root().join(folder), &mut source);
    }
    // NVIDIA's MPS too, which serves clients in direct mode.
    let known = (0..1000).filter_map(|number| result_name(CUresult(number)));
    let mps = known.filter(|name| name.starts_with("CUDA_ERROR_MPS_"));
    let explained = statuses(&page.text);
    let missing: Vec<_> = statuses(&source)
        .into_iter()
        .chain(mps)
        .filter(|name| !name.ends_with('_') && !explained.contains(name))
        .collect();
    assert!(
        missing.is_empty(),
        "not in docs/troubleshooting.md: {missing:?}"
    );

    let mut numbered = 0;
    for line in page.text.lines() {
        for (before, rest) in line
            .match_indices("`CUDA_ERROR_")
            .map(|(at, _)| line.split_at(at))
        {
            let name = rest[1..].split('`').next().expect("a name");
            let number = before
                .trim_end()
                .rsplit([' ', '|'])
                .next()
                .unwrap_or_default();
            let number = number
                .parse()
                .unwrap_or_else(|_| panic!("no number before {name}: {line}"));
            assert_eq!(result_name(CUresult(number)), Some(name), "{number}");
            numbered += 1;
        }
    }
    assert!(numbered > 20, "only {numbered} statuses");
}
