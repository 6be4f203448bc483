//! Holds the order of the engine's modules: each has a layer and imports from its own layer and from lower ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree, Visibility};

/// Modules in the largest set in which each one depends on each other one, by way of others or directly. May be lowered, not
/// raised.
const LARGEST_CIRCLE: usize = 4;

/// From the bottom up. A name stands for the module and for all modules below it that have no layer of their own.
const LAYERS: [(&str, &[&str]); 10] = [
    ("types without devices and sessions", &["base"]),
    ("devices", &["gpu"]),
    ("images", &["images"]),
    ("objects of a session", &["objects"]),
    (
        "sessions",
        &[
            "session",
            "base/graph_turns/session",
            "base/printing/session",
            "objects/activity/session",
            "objects/levels/session",
            "objects/marks/session",
            "objects/pace/session",
            "objects/shared_events/session",
            "objects/streams/session",
            "objects/times/session",
        ],
    ),
    (
        "what the threads share",
        &["threads", "objects/trace/traces"],
    ),
    ("lasting state", &["lasting"]),
    (
        "calls",
        &[
            "calls",
            "objects/moves/session",
            "objects/runs/session",
            "objects/snapshot/session",
        ],
    ),
    (
        "scheduling",
        &[
            "scheduling",
            "objects/awaited/release",
            "objects/fairness/session",
            "objects/held/session",
            "objects/suspects/session",
            "objects/trace/collect",
            "objects/trace/session",
            "threads/gate/run",
            "threads/slow/run",
            "threads/undertaker/run",
        ],
    ),
    ("engine", &["engine"]),
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The modules and their files. The engine itself is `engine`, the others are named as seen from there: `calls/graph`.
fn modules() -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::from([("engine".to_owned(), source().join("engine.rs"))]);
    let mut folders = vec![source().join("engine")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let inside = path
                .strip_prefix(source().join("engine"))
                .expect("a prefix");
            let name = inside.with_extension("");
            let name = match name.file_name() {
                Some(last) if last == "mod" => name.parent().expect("a folder").to_owned(),
                _ => name,
            };
            found.insert(name.to_str().expect("UTF-8").to_owned(), path);
        }
    }
    // Tests may import anything.
    found.retain(|name, _| name != "order" && name != "testing" && !name.ends_with("tests"));
    found
}

/// The paths that a file imports or names from other modules, outside of tests.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl Paths {
    fn expand(&mut self, before: &[String], tree: &UseTree) {
        let with = |name: String| [before, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.expand(&with(path.ident.to_string()), &path.tree),
            UseTree::Name(name) => self.0.push(with(name.ident.to_string())),
            UseTree::Rename(name) => self.0.push(with(name.ident.to_string())),
            UseTree::Glob(_) => self.0.push(with("*".to_owned())),
            UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|tree| self.expand(before, tree)),
        }
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|path| path.is_ident("test"))
    })
}

impl<'a> Visit<'a> for Paths {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.expand(&[], &item.tree);
    }

    /// `pub(in crate::engine)` imports nothing.
    fn visit_visibility(&mut self, _: &'a Visibility) {}

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        // A single name is a local one.
        if path.segments.len() > 1 {
            self.0.push(names.collect());
        }
        visit::visit_path(self, path);
    }
}

/// The module that a path in a module leads to, if it is one of the engine's.
fn target<'a>(
    modules: &'a BTreeMap<String, PathBuf>,
    from: &str,
    path: &[String],
) -> Option<&'a str> {
    let mut at: Vec<&str> = match from {
        "engine" => Vec::new(),
        from => from.split('/').collect(),
    };
    let mut rest = path.iter().map(String::as_str).peekable();
    match rest.peek()? {
        &"crate" => {
            rest.next();
            (rest.next()? == "engine").then_some(())?;
            at.clear();
        }
        &"self" | &"super" => {
            while let Some(step) = rest.next_if(|step| matches!(*step, "self" | "super")) {
                if step == "super" && at.pop().is_none() {
                    // Above the engine.
                    return None;
                }
            }
        }
        // A module of this one, or another crate.
        first => {
            let child = [&at[..], &[first]].concat().join("/");
            modules.contains_key(&child).then_some(())?;
        }
    }
    for step in rest {
        let inside = [&at[..], &[step]].concat();
        if !modules.contains_key(&inside.join("/")) {
            break;
        }
        at = inside;
    }
    let name = if at.is_empty() {
        "engine".to_owned()
    } else {
        at.join("/")
    };
    modules.get_key_value(&name).map(|(name, _)| name.as_str())
}

fn imports(modules: &BTreeMap<String, PathBuf>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found = BTreeMap::new();
    for (from, file) in modules {
        let text = fs::read_to_string(file).expect("a source");
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{from}: {error}"));
        let mut paths = Paths::default();
        paths.visit_file(&parsed);
        let targets = paths
            .0
            .iter()
            .filter_map(|path| target(modules, from, path));
        let others: BTreeSet<&str> = targets.filter(|to| *to != from).collect();
        found.insert(from.as_str(), others);
    }
    found
}

/// Position of a module's layer, the lowest one first.
fn layer(module: &str) -> Option<usize> {
    let of_name = |name: &str| LAYERS.iter().position(|(_, names)| names.contains(&name));
    let mut name = Some(module);
    while let Some(this) = name {
        if let Some(found) = of_name(this) {
            return Some(found);
        }
        name = this.rsplit_once('/').map(|(outer, _)| outer);
    }
    None
}

/// Modules from which a module can be reached by imports that lead back to it, itself included.
fn circle<'a>(imports: &BTreeMap<&'a str, BTreeSet<&'a str>>, of: &'a str) -> BTreeSet<&'a str> {
    let reached = |from: &'a str| {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![from]);
        while let Some(module) = todo.pop() {
            todo.extend(imports[module].iter().filter(|to| seen.insert(**to)));
        }
        seen
    };
    let all = reached(of);
    all.iter()
        .copied()
        .filter(|one| reached(one).contains(of))
        .chain([of])
        .collect()
}

#[test]
fn each_module_has_a_layer() {
    let modules = modules();
    let missing: Vec<&String> = modules
        .keys()
        .filter(|name| layer(name).is_none())
        .collect();
    assert!(missing.is_empty(), "to be added to LAYERS: {missing:?}");
    for name in LAYERS.iter().flat_map(|(_, names)| *names) {
        assert!(
            modules.contains_key(*name),
            "LAYERS names {name}, which is no module"
        );
    }
}

#[test]
fn no_module_imports_from_a_higher_layer() {
    let modules = modules();
    let mut upward = Vec::new();
    for (from, targets) in imports(&modules) {
        for to in targets {
            let (below, above) = (layer(from).expect("a layer"), layer(to).expect("a layer"));
            if below < above {
                upward.push(format!(
                    "{from} ({}) imports from {to} ({})",
                    LAYERS[below].0, LAYERS[above].0
                ));
            }
        }
    }
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}

#[test]
fn circles_are_small() {
    let modules = modules();
    let imports = imports(&modules);
    let circles = imports.keys().map(|module| circle(&imports, module));
    let largest = circles.max_by_key(BTreeSet::len).expect("modules");
    assert!(
        largest.len() <= LARGEST_CIRCLE,
        "{} modules are in a circle, more than {LARGEST_CIRCLE}: {largest:?}",
        largest.len()
    );
}
