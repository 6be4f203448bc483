//! The kinds of records in a session's description: one row each.

/// Hands the rows of the table to a macro. A row is
///
/// ```text
/// Name = number: version, stage, end;
/// ```
///
/// with the version of the state's encoding, the stage in which the next server restores it, and the end of its validity. The
/// next server has a type of the row's name that implements `Lasting` (`engine/lasting`); a row without one does not compile.
macro_rules! for_each_kind {
    ($callback:ident) => {
        $callback! {
            /// The client's identity and terms: the first record.
            Client = 1: 3, First, Never;
            /// A message that creates an object. A later one with the same operation and key replaces it.
            Makes = 2: 1, Objects, WithObject;
            /// A message that changes an object. Only a later one with identical content replaces it.
            Sets = 3: 1, Objects, WithObject;
            /// Device memory; the key is its address.
            Memory = 5: 4, Memory, Alone;
            /// Pinned memory; the key is its address.
            Host = 7: 2, Memory, Alone;
            /// A reservation of addresses; the key is the first.
            Reservation = 9: 1, Memory, Alone;
            /// Physical memory; the key is the handle under which it was created.
            Physical = 11: 2, Memory, Alone;
            /// The handle of physical memory was released.
            Released = 13: 1, Memory, With(Physical);
            /// A mapping; the key is its address.
            Mapping = 14: 1, Memory, Alone;
            /// Access to mappings; the key is the first address.
            Access = 16: 1, Memory, With(Mapping);
            /// A message that told the client the address of a variable; the key is the address.
            Variable = 17: 1, Objects, Alone;
            /// Contents of an image's variables. The key is the image, the part is the server's ordinal of the device.
            Variables = 19: 2, Contents, WithObject;
            /// A graph; the key is its handle.
            Graph = 20: 2, Graphs, WithObject;
            /// An instance of a graph; the key is its handle.
            GraphExec = 21: 4, Instances, WithObject;
            /// Findings about an image, so that the next server need not analyze it; the key is the image.
            Leaves = 22: 3, First, WithObject;
            /// Time of an event's last record; the key is the event's handle.
            Time = 23: 1, Contents, WithObject;
            /// Whether an event's last record was in a capture; the key is the event's handle.
            Captured = 29: 1, Contents, WithObject;
            /// A limit of a device's context; the key is the server's ordinal, with the limit in the upper half.
            Limit = 24: 1, Objects, Never;
            /// A memory pool; the key is its handle. Its memory may be made before it.
            Pool = 26: 1, Memory, WithObject;
            /// Device memory that the server has divided for a pool; the key is its address.
            PoolMemory = 27: 1, Memory, Alone;
            /// Registered memory, which is a file of the client's; the key is its address.
            Registered = 28: 1, Memory, Alone;
            /// An array with its levels or planes; the key is its handle.
            Array = 30: 1, Memory, Alone;
            /// A texture object, or with [`SURFACE`] a surface object; the key is its value.
            Texture = 31: 1, Contents, Alone;
            /// Device memory that other sessions may open; the key is its first address.
            Given = 32: 1, Objects, Alone;
            /// Device memory of another session that the session has open; the key is its first address.
            Opened = 33: 1, Contents, Alone;
            /// An event that sessions share; the key is its handle.
            SharedEvent = 34: 1, Objects, WithObject;
            /// A message that told the client of multiprocessors or of a description of them; the key is its number.
            Resource = 35: 1, Objects, Never;
            /// A part of a device that is assigned to a context of the client; the key is its handle.
            Confined = 36: 1, Objects, WithObject;
            /// Physical memory was exported; the key is the handle under which it was created.
            Exported = 37: 1, Memory, With(Physical);
            /// A further handle of physical memory; the key is that handle.
            Retained = 38: 1, Memory, Alone;
            /// Device memory that others have by a descriptor stays where it is; the key is its address.
            Stays = 39: 1, Objects, With(Memory);
            /// A linker whose output the client has; the key is its handle.
            Linked = 40: 1, Objects, WithObject;
        }
    };
}

/// In the key of [`Kind::Texture`]: a surface object.
pub const SURFACE: u64 = 1 << 63;

pub(in crate::engine) use for_each_kind;

/// Stage in which a record is restored: objects come after the objects that they refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Before all objects.
    First,
    /// Memory, which needs no other object. The memory of all sessions comes before all other objects of any session, whose
    /// allocations must not take its addresses.
    Memory,
    /// Objects that refer to none of the later stages.
    Objects,
    /// Contents of objects; images may be loaded again for their variables.
    Contents,
    /// Graphs refer to functions.
    Graphs,
    /// Instances refer to graphs.
    Instances,
    /// Limits that the objects need not comply with.
    Last,
}

/// Condition that invalidates a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing but a later record of the same kind and key.
    Never,
    /// [`Kind::Ends`] of its key.
    WithObject,
    /// [`Kind::Gone`] of its kind and key.
    Alone,
    /// [`Kind::Gone`] of this kind and its key.
    With(Kind),
}

macro_rules! end {
    (With($kind:ident)) => {
        End::With(Kind::$kind)
    };
    ($end:ident) => {
        End::$end
    };
}

macro_rules! define {
    ($($(#[doc = $doc:literal])* $name:ident = $number:literal: $version:literal, $stage:ident, $end:ident $(($of:ident))?;)*) => {
        /// The kind of a record.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind {
            $($(#[doc = $doc])* $name = $number,)*
            /// The object with this key has been destroyed, and with it all settings of it.
            Ends = 4,
            /// The state with this key has been destroyed; the part is the number of its kind.
            Gone = 25,
        }

        impl Kind {
            /// The kind of a number.
            pub fn of(number: u16) -> Option<Kind> {
                match number {
                    $($number => Some(Kind::$name),)*
                    4 => Some(Kind::Ends),
                    25 => Some(Kind::Gone),
                    _ => None,
                }
            }

            /// Version of its state's encoding.
            pub fn version(self) -> u8 {
                match self {
                    $(Kind::$name => $version,)*
                    Kind::Ends | Kind::Gone => 0,
                }
            }

            /// The stage in which it is restored.
            pub fn stage(self) -> Stage {
                match self {
                    $(Kind::$name => Stage::$stage,)*
                    Kind::Ends | Kind::Gone => Stage::First,
                }
            }

            /// The condition that invalidates its records.
            pub fn end(self) -> End {
                match self {
                    $(Kind::$name => end!($end $(($of))?),)*
                    Kind::Ends | Kind::Gone => End::Never,
                }
            }

            /// The kinds that [`Kind::Gone`] of this one invalidates.
            pub fn gone_with(self) -> impl Iterator<Item = Kind> {
                let all = [$(Kind::$name),*].into_iter();
                all.filter(move |kind| match kind.end() {
                    End::Alone => *kind == self,
                    End::With(other) => other == self,
                    End::Never | End::WithObject => false,
                })
            }
        }
    };
}

for_each_kind!(define);

macro_rules! rows {
    ($($(#[$doc:meta])* $name:ident = $number:literal: $version:literal, $stage:ident, $end:ident $(($of:ident))?;)*) => {
        concat!($(stringify!($name), $number, ":", $version, ";"),*)
    };
}

/// Fingerprint of the table: changes with a kind, its number or its version (FNV-1a of the rows).
pub const FORMAT: u64 = {
    let rows = for_each_kind!(rows).as_bytes();
    let (mut hash, mut at) = (0xcbf2_9ce4_8422_2325u64, 0);
    while at < rows.len() {
        hash = (hash ^ rows[at] as u64).wrapping_mul(0x100_0000_01b3);
        at += 1;
    }
    hash
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_its_kind() {
        let known = (0..100).filter_map(Kind::of);
        let known: Vec<Kind> = known.collect();
        assert_eq!(known.len(), 34);
        assert!(
            known
                .iter()
                .all(|kind| Kind::of(*kind as u16) == Some(*kind))
        );
    }

    #[test]
    fn dependent_records_are_gone_with_theirs() {
        let gone = |kind: Kind| kind.gone_with().collect::<Vec<_>>();
        let physical = [Kind::Physical, Kind::Released, Kind::Exported];
        assert_eq!(gone(Kind::Physical), physical);
        assert_eq!(gone(Kind::Mapping), [Kind::Mapping, Kind::Access]);
        assert_eq!(gone(Kind::Memory), [Kind::Memory, Kind::Stays]);
        assert_eq!(gone(Kind::Makes), []);
    }
}
