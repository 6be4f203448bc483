//! The driver's symbols by index, in the order of [`mpsshim_api::table::symbols`], and the functions that calls go to.
//!
//! `build.rs` writes the list; a symbol's place in it is its index everywhere in the shim.

/// The address of a function that takes some driver call's arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Target(*const ());

// SAFETY: the address of code, which every thread may call; `Target` itself never reads through it.
unsafe impl Sync for Target {}
// SAFETY: as above.
unsafe impl Send for Target {}

impl Target {
    /// `address` must be a function whose signature is that of the symbol it will serve.
    pub const fn new(address: *const ()) -> Self {
        Self(address)
    }

    pub fn address(self) -> *const () {
        self.0
    }
}

macro_rules! entry_points {
    ($($index:literal $symbol:ident)*) => {
        /// How many symbols there are.
        pub const COUNT: usize = [$($index),*].len();
        /// The symbols by index.
        pub static SYMBOLS: [&str; COUNT] = [$(stringify!($symbol)),*];
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

/// The index of a symbol.
pub fn index_of(symbol: &str) -> Option<usize> {
    SYMBOLS.binary_search(&symbol).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_those_of_the_table() {
        assert_eq!(COUNT, mpsshim_api::table::symbols().len());
        for (index, symbol) in mpsshim_api::table::symbols().enumerate() {
            assert_eq!(SYMBOLS[index], symbol);
            assert_eq!(index_of(symbol), Some(index));
        }
    }
}
