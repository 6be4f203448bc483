//! Limits of the objects and memory that one session may hold, declared once: the code uses these constants, and the
//! section "Bounds" of docs/threat-model.md is generated from [`TABLE`]. Other sizes are bounded by their container: a
//! message by the ring, a name by its message.

use mpsshim_proto::segment::FLAGS;
use std::fmt::Write as _;

/// The unit of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Objects.
    Count,
    /// Bytes.
    Bytes,
    /// A fraction: this many of them make up a device's memory.
    PartOfDevice,
}

/// One row of the table.
#[derive(Debug)]
pub struct Bound {
    /// Name of the constant.
    pub name: &'static str,
    /// The limited objects or memory.
    pub what: &'static str,
    /// Maximum that a session may hold at a time.
    pub most: u64,
    /// Unit of the maximum.
    pub unit: Unit,
    /// Reason for this maximum.
    pub reason: &'static str,
}

macro_rules! bounds {
    ($($name:ident: $kind:ty = $most:expr, $unit:ident, $what:literal, $reason:literal;)*) => {
        $(
            #[doc = concat!("Most of a session: ", $what, ".")]
            pub const $name: $kind = $most;
        )*

        /// All bounds.
        pub static TABLE: &[Bound] = &[
            $(Bound {
                name: stringify!($name),
                what: $what,
                most: $name as u64,
                unit: Unit::$unit,
                reason: $reason,
            },)*
        ];
    };
}

bounds! {
    STREAMS: usize = 4 * FLAGS, Count, "streams, those of contexts included",
        "four for each completion flag of the segment; a stream is a driver's object and may be a hardware queue";
    EVENTS: usize = 1 << 20, Count, "events",
        "frameworks keep one for each tensor in flight";
    HELD_MESSAGES: usize = 4096, Count, "messages behind a stream that waits for the client",
        "they are copied out of the ring; beyond it the client's ring fills up, and only its own calls wait";
    HELD_BYTES: usize = 8 << 20, Bytes, "bytes of such messages",
        "two rings' worth";
    IMAGES: usize = 1 << 16, Count, "modules, and as many libraries and references to textures and surfaces",
        "large frameworks load some thousands";
    IMAGE: u64 = 4 << 30, Bytes, "bytes of one image",
        "the largest fatbins of libraries have 1 to 2 GiB";
    IMAGES_BYTES: u64 = 16 << 30, Bytes, "bytes of images that it sent and somebody uses",
        "the libraries of frameworks have 1 to 3 GiB; what others have sent before is not sent again";
    DESCRIBED: usize = 1 << 20, Bytes, "bytes of one message in its description",
        "names and options are far shorter; a session with a longer one is not made again elsewhere";
    FINDINGS: usize = 256 << 10, Bytes, "bytes of findings about its images in its description",
        "a server that comes after analyzes further images itself";
    LOOKED_AT: u64 = 16 << 20, Bytes, "bytes of variables that are compared with their first content",
        "they are read whenever it comes to rest; tables of random number generators have some 100 KiB";
    SAVED: u64 = 256 << 10, Bytes, "bytes of variables that are saved for a server that comes after, because they have changed",
        "they are written to the description whenever it comes to rest; counters and states are far shorter";
    SAVED_IN_FILES: u64 = 16 << 20, Bytes, "bytes of variables that are saved in files instead, because they are more",
        "as many as are looked at";
    SAVED_GRAPHS: usize = 1 << 20, Bytes, "bytes of graphs and instances that are saved for a server that comes after",
        "as messages in the description; a node takes some 100 to 300 bytes";
    FUNCTIONS: usize = 1 << 20, Count, "functions",
        "each a name and a driver's handle; no kernel is loaded for it";
    LINKS: usize = 16, Count, "linkers",
        "each is a thread of the server's, of which there are 256 for all; a program that compiles has one or a few at a time";
    LINK_INPUT: u64 = 1 << 30, Bytes, "bytes of one input of a linker",
        "as the code that is looked into";
    GREENS: usize = 1 << 16, Count, "green contexts, those that were destroyed included",
        "a place is used once, so that a stale handle never fits";
    RESOURCES: usize = 4096, Count, "groups of multiprocessors, and as many descriptions of them",
        "a device has fewer than 200 multiprocessors to part";
    GRAPHS: usize = 1 << 18, Count, "graphs, those inside nodes included",
        "a handle is made for each that a client asks about";
    GRAPH_NODES: usize = 1 << 22, Count, "nodes of graphs with handles",
        "captured training steps have up to some 100,000";
    GRAPH_EXECS: usize = 1 << 16, Count, "instances of graphs",
        "one for each shape of a model's input is usual";
    GRAPH_PARTS: u64 = 1 << 17, Count, "nodes and edges of one graph, those of graphs inside it as often as they are there",
        "twenty graphs that have the last one inside twice have a million nodes; captured training steps have up to some 100,000";
    GRAPH_CONDITIONS: usize = 1 << 17, Count, "handles of conditional nodes, those of all graphs together",
        "one for each loop, branch or switch; a node looks for its handle among those of its graph";
    GRAPHS_PARTS: u64 = 1 << 20, Count, "nodes and edges of all graphs and instances, captures included",
        "the driver takes some 500 bytes and more for each";
    GRAPH_WAITS: usize = 4096, Count, "different waits for words in graphs",
        "the server writes each word when the client is gone";
    GRAPH_DEPTH: usize = 64, Count, "graphs inside graphs",
        "each level is a level of recursion in the server";
    GRAPH_TEXT: usize = 256 << 20, Bytes, "bytes of the text of a graph",
        "it is a memory file of the server's until the client has it";
    ARRAYS: usize = 1 << 18, Count, "arrays, levels and planes included, and as many mipmapped arrays",
        "each a handle; their memory counts to the memory limit";
    TEXTURES: usize = 1 << 20, Count, "texture and surface objects",
        "32 bytes each on the device";
    ALLOCATIONS: usize = 1 << 20, Count, "handles of physical memory",
        "at 2 MiB each more than any device has";
    MAPPINGS: usize = 1 << 20, Count, "mappings of physical memory",
        "as handles";
    RESERVATIONS: usize = 1 << 14, Count, "reservations of addresses",
        "one for each segment of an allocator is usual";
    RESERVED: u64 = 8 << 40, Bytes, "bytes of addresses reserved",
        "half of the arena, so that others find room too";
    POOLS: usize = 1 << 12, Count, "memory pools",
        "a program has one or a few for each device";
    POOL_BLOCKS: usize = 1 << 22, Count, "allocations from pools",
        "some 100 bytes each in the server";
    SHARED: usize = 1 << 16, Count, "allocations that others may open",
        "MPI and frameworks share some hundreds";
    OPENED: usize = 1 << 16, Count, "allocations of others that are open",
        "as those shared";
    HOST_SPARE: u64 = 256 << 20, Bytes, "bytes of pinned memory kept after it was freed",
        "a sixteenth of its user's bound if that is less; registering costs milliseconds, and is spared at the next \
         request of the same size";
    PRINTED: usize = 16 << 20, Bytes, "bytes of printed text that was not fetched",
        "sixteen times the driver's usual buffer, which loses its oldest text too";
    PRINT_BUFFER: u64 = 64 << 20, Bytes, "bytes of the driver's buffer for printing",
        "it is device memory of the context, for all clients, and written out at once; the usual size is 1 MiB";
    STACKS_PART: u64 = 4, PartOfDevice, "memory for the stacks of threads (`cudaLimitStackSize`)",
        "it belongs to the context, for all clients, and stays; on an H100 a KiB of stack takes 264 MiB, so that 76 KiB are possible";
    HEAP_PART: u64 = 8, PartOfDevice, "memory for `malloc` in kernels (`cudaLimitMallocHeapSize`)",
        "it belongs to the program's own context; the one that clients share has 512 MiB";
    SYNC_DEPTH: u64 = 24, Count, "levels of kernels that wait for kernels (`cudaLimitDevRuntimeSyncDepth`)",
        "the deepest that devices can; each takes up to 150 MiB of the device and stays";
    PENDING_LAUNCHES: u64 = 1 << 16, Count, "pending launches by kernels (`cudaLimitDevRuntimePendingLaunchCount`)",
        "32 times the usual; each takes 9,376 bytes of the device and stays";
}

/// The rows as written in the section of docs/threat-model.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "| what one session may have at a time | most | why so many |\n|---|---|---|\n",
    );
    for bound in TABLE {
        let most = match bound.unit {
            Unit::Count => grouped(bound.most),
            Unit::Bytes => amount(bound.most),
            Unit::PartOfDevice => format!("1/{} of the device's memory", bound.most),
        };
        let _ = writeln!(text, "| {} | {most} | {} |", bound.what, bound.reason);
    }
    text
}

/// A number with thousands separated by commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in the largest unit that divides them.
fn amount(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let found = units
        .into_iter()
        .find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match found {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{} bytes", grouped(bytes)),
    }
}

/// Stack of a thread, bytes: as large as the driver's compiler and linker, which run in the slow lane, may expect in a
/// program of their own. Only its used part takes memory.
pub const STACK: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const BEGIN: &str = "<!-- written from server/src/engine/base/bounds.rs by the test of the bounds with UPDATE_DOCS=1 -->\n";
    const END: &str = "<!-- the end of what is written -->\n";

    #[test]
    fn the_threat_model_has_all_bounds() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/threat-model.md");
        let text = std::fs::read_to_string(&path).expect("docs/threat-model.md");
        let (before, rest) = text.split_once(BEGIN).expect("the begin of the section");
        let (section, after) = rest.split_once(END).expect("the end of the section");
        if std::env::var_os("UPDATE_DOCS").is_some() && section != markdown() {
            let now = [before, BEGIN, &markdown(), END, after].concat();
            std::fs::write(&path, now).expect("write docs/threat-model.md");
            return;
        }
        assert!(
            section == markdown(),
            "docs/threat-model.md differs from the table: run UPDATE_DOCS=1 cargo test -p mpsshim-server bounds"
        );
    }

    #[test]
    fn every_bound_is_one_and_has_a_reason() {
        let mut names: Vec<&str> = TABLE.iter().map(|bound| bound.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
        for bound in TABLE {
            assert!(bound.most > 0, "{}", bound.name);
            let texts = [bound.what, bound.reason];
            let sound = |text: &&str| text.len() > 5 && !text.contains('|');
            assert!(texts.iter().all(sound), "{}", bound.name);
        }
    }

    #[test]
    fn numbers_are_read_easily() {
        let of = |number| (grouped(number), amount(number));
        assert_eq!(of(999), ("999".into(), "999 bytes".into()));
        assert_eq!(of(1 << 20), ("1,048,576".into(), "1 MiB".into()));
        assert_eq!(amount(1536), "1,536 bytes");
        assert_eq!(amount(8 << 40), "8 TiB");
    }
}
