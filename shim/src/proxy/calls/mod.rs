//! The driver calls that proxy mode serves, one file per subject.
//!
//! A handler has the signature of its symbol; the pointer types in it ([`crate::ffi`]) carry their guarantees. If a
//! symbol exists for both flavours of the default stream, one generic handler serves both.

mod array;
mod attributes;
mod capture;
mod context;
mod copy;
mod device;
mod event;
mod function;
mod graph;
mod graph_node;
mod green;
mod host;
mod ipc;
pub mod launch;
mod library;
mod link;
mod managed;
mod memop;
mod memory;
mod memset;
mod misc;
mod module;
mod occupancy;
mod old_launch;
mod peer;
mod pointer;
mod pool;
mod rectangle;
pub mod reference;
mod service;
mod stream;
mod streamattr;
mod tensor_map;
mod texture;
mod user_object;
mod virtual_memory;

use crate::loader::symbols::Target;

/// A symbol and its handler.
pub type Entry = (&'static str, Target);

/// Lists the handlers of a file: `SYMBOL(_, _) => HANDLER`, with a `_` for each argument. A test compares their types with
/// the driver's declarations ([`crate::signature`]).
macro_rules! entries {
    ($($symbol:ident($($argument:tt),*) => $handler:expr),* $(,)?) => {
        $crate::proxy::calls::entries! { ENTRIES: $($symbol($($argument),*) => $handler),* }
    };
    ($table:ident: $($symbol:ident($($argument:tt),*) => $handler:expr),* $(,)?) => {
        /// The symbols served here.
        pub const $table: &[$crate::proxy::calls::Entry] = &[$((
            stringify!($symbol),
            $crate::loader::symbols::Target::new($handler as unsafe extern "C" fn($($argument),*) -> _ as *const ()),
        )),*];

        #[cfg(test)]
        pub fn signatures() -> Vec<$crate::signature::Named> {
            use $crate::signature::Function;
            vec![$((
                stringify!($symbol),
                ($handler as unsafe extern "C" fn($($argument),*) -> _).signature(),
            )),*]
        }
    };
}
pub(crate) use entries;

macro_rules! parts {
    ($($part:ident)*) => {
        const PARTS: &[&[Entry]] = &[$($part::ENTRIES),*];

        /// The symbols with the signatures of their handlers.
        #[cfg(test)]
        pub fn signatures() -> Vec<crate::signature::Named> {
            [$($part::signatures()),*].concat()
        }
    };
}

parts! {
    array capture context copy device event function graph graph_node green host ipc launch library link managed
    memop memory memset misc module occupancy old_launch peer pointer pool rectangle reference service stream
    streamattr tensor_map texture user_object virtual_memory
}

const COUNT: usize = {
    let (mut count, mut part) = (0, 0);
    while part < PARTS.len() {
        count += PARTS[part].len();
        part += 1;
    }
    count
};

static ALL: [Entry; COUNT] = {
    let mut all = [PARTS[0][0]; COUNT];
    let (mut next, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut i = 0;
        while i < PARTS[part].len() {
            all[next] = PARTS[part][i];
            next += 1;
            i += 1;
        }
        part += 1;
    }
    all
};

/// The handler of each served symbol.
pub static SERVED: &[Entry] = &ALL;

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_api::table::{self, Class, TABLE};
    use std::collections::BTreeSet;

    #[test]
    fn each_symbol_is_served_once() {
        let mut seen = BTreeSet::new();
        for (symbol, _) in SERVED {
            assert!(seen.insert(symbol), "{symbol} is served twice");
        }
    }

    /// Each row that the table declares as served has a handler for its newest symbol, and only such rows have
    /// handlers.
    #[test]
    fn the_table_and_the_handlers_agree() {
        let served: BTreeSet<_> = SERVED.iter().map(|(symbol, _)| *symbol).collect();
        let has_handler = |class| !matches!(class, Class::Absent(_) | Class::Genuine);
        for symbol in &served {
            let row = table::entry_point(symbol).expect(symbol);
            assert!(has_handler(row.class), "{symbol}");
        }
        let own = ["cuInit", "cuGetProcAddress"];
        for rows in TABLE.chunk_by(|a, b| a.name == b.name) {
            let newest = rows.last().unwrap();
            if own.contains(&newest.name) || !has_handler(newest.class) {
                continue;
            }
            for symbol in [newest.legacy, newest.per_thread].into_iter().flatten() {
                assert!(served.contains(symbol), "{symbol} has no handler");
            }
        }
    }
}
