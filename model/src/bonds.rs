//! Reasons why a session cannot be recreated in another context: its bonds to the current one.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! bonds {
    ($($(#[doc = $doc:literal])* $name:ident = $bit:literal: $text:literal;)*) => {
        impl Bonds {
            $($(#[doc = $doc])* pub const $name: Bonds = Bonds(1 << $bit);)*
            /// All of them, each with its name for operators.
            pub const ALL: &'static [(Bonds, &'static str)] = &[$((Bonds::$name, $text),)*];
        }
    };
}

/// A set of reasons. Without any, the session is portable: its objects can be recreated in another context, unnoticed
/// by its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bonds(pub u32);

bonds! {
    /// Its memory is not kept: there is no keeper, or the keeper is full.
    UNKEPT = 0: "unkept memory";
    /// Graphs or graph instances that cannot be serialized; captures.
    GRAPHS = 1: "graphs";
    /// Graphs or graph instances that have changed and are not serialized yet.
    CHANGED_GRAPHS = 16: "graphs that have changed";
    /// Variables that it has used by address, and whose content is not saved.
    VARIABLES = 2: "addresses of variables";
    /// An image in use whose kernels may have written its variables, with content that is not saved; or may store
    /// addresses of its functions.
    IMAGES = 6: "kernels with variables";
    /// Arrays and mipmapped arrays.
    ARRAYS = 3: "arrays";
    /// Texture and surface objects, and references.
    TEXTURES = 4: "textures";
    /// Memory pools, and allocations in stream order.
    POOLS = 5: "memory pools";
    /// Memory or events shared with other processes.
    SHARED = 7: "shared memory or events";
    /// Graphs that were captured in green contexts or in contexts restricted to some multiprocessors; many green contexts
    /// that were destroyed, and of whose resources the client knows. For another context of the same server, also these
    /// contexts.
    PARTITIONS = 8: "partitions";
    /// Access between devices.
    PEERS = 9: "peer access";
    /// Registered host memory.
    REGISTERED = 10: "registered memory";
    /// Events with timing that were recorded, and whose times are not saved yet.
    TIMES = 12: "recorded times";
    /// Linkers.
    LINKERS = 13: "linkers";
    /// Kernels that print.
    PRINTS = 14: "device printf";
    /// More streams or other objects than fit in its description.
    MANY = 15: "too many objects";
}

impl Bonds {
    /// Bonds until the session has been saved at rest.
    pub const UNTIL_SAVED: Bonds =
        Bonds(Bonds::IMAGES.0 | Bonds::VARIABLES.0 | Bonds::CHANGED_GRAPHS.0 | Bonds::TIMES.0);

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds others to these if a condition holds.
    #[must_use]
    pub fn with(self, others: Bonds, condition: bool) -> Bonds {
        match condition {
            true => Bonds(self.0 | others.0),
            false => self,
        }
    }

    /// The names for operators.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let has = move |(bond, _): &&(Bonds, &'static str)| self.0 & bond.0 != 0;
        Bonds::ALL.iter().filter(has).map(|(_, name)| *name)
    }
}

impl fmt::Display for Bonds {
    /// The names, separated by semicolons.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in self.names().enumerate() {
            f.write_str(if at == 0 { "" } else { "; " })?;
            f.write_str(name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_bit_and_a_name_of_its_own() {
        let all = Bonds::ALL
            .iter()
            .fold(Bonds::default(), |all, (one, _)| all.with(*one, true));
        assert_eq!(all.0.count_ones() as usize, Bonds::ALL.len());
        assert_eq!(all.names().count(), Bonds::ALL.len());
        let two = Bonds::GRAPHS
            .with(Bonds::POOLS, true)
            .with(Bonds::MANY, false);
        assert_eq!(two.to_string(), "graphs; memory pools");
        assert_eq!(Bonds::default().to_string(), "");
        assert!(Bonds::default().is_empty() && !two.is_empty());
    }
}
