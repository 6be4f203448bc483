//! The table of operations in docs/protocol.md, written from the table in the code.

use mpsshim_proto::handshake::PROTOCOL_VERSION;
use mpsshim_proto::ops::{Kind, Lane, Op, Ordering};
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!-- operations: begin -->\n";
const END: &str = "<!-- operations: end -->\n";

fn table() -> String {
    let mut text = String::from(
        "| opcode | operation | | body → answer, bytes | lane | ordered behind | what it does |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for op in Op::ALL {
        let (body, answer) = op.structs();
        let (body_len, answer_len) = op.lengths();
        let named = |name: &str, len: usize| match name.rsplit("::").next().unwrap_or(name).trim() {
            "()" => "nothing".to_owned(),
            name => format!("{name} {len}"),
        };
        let mut carries = named(body, body_len);
        if op.has_rest() {
            carries += " +";
        }
        if op.kind() == Kind::Request {
            let _ = write!(carries, " → {}", named(answer, answer_len));
        }
        let kind = match op.kind() {
            Kind::Async => "async",
            Kind::Request => "request",
        };
        let lane = match op.lane() {
            Lane::Dispatch => "dispatch",
            Lane::Slow | Lane::SlowSubmits => "slow",
            Lane::SlowForGraphs => "slow for graphs",
        };
        let ordering = match op.ordering() {
            Ordering::Free => "nothing",
            Ordering::Objects(_) | Ordering::Launch(_) | Ordering::Optional(_) => "its objects",
            Ordering::Instances => "launches of graphs",
            Ordering::Earlier | Ordering::Everything => "everything",
        };
        let what = op
            .description()
            .trim()
            .replace("[`", "`")
            .replace("`]", "`");
        let number = *op as u16;
        let _ = writeln!(
            text,
            "| {number} | {op:?} | {kind} | {carries} | {lane} | {ordering} | {what} |"
        );
    }
    text
}

#[test]
fn protocol_md_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol.md");
    let document = std::fs::read_to_string(&path).expect("docs/protocol.md");
    let (before, rest) = document.split_once(BEGIN).expect("where the table begins");
    let (_, after) = rest.split_once(END).expect("where the table ends");
    let wanted = format!("{before}{BEGIN}{}{END}{after}", table());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).expect("write docs/protocol.md");
    } else {
        assert!(
            document == wanted,
            "docs/protocol.md differs from the table: run UPDATE_DOCS=1 cargo test -p mpsshim-proto --test protocol"
        );
    }
    let version = format!("`PROTOCOL_VERSION` ({PROTOCOL_VERSION})");
    assert!(
        document.contains(&version),
        "docs/protocol.md: not {version}"
    );
}
