//! Handles that a program holds for objects in the server.
//!
//! The client chooses them, so that creating a stream or an event needs no answer. A handle is a kind, a generation and
//! an index; the generation distinguishes a stale handle from its successor. The high bits make it differ from every
//! address a process can map and from the constants 1 and 2 that name default streams.

macro_rules! kinds {
    ($($name:ident = $number:literal,)*) => {
        /// Type of the object that a handle refers to. The discriminants are part of the wire format.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind { $($name = $number,)* }

        impl Kind {
            /// The kind of this number.
            pub fn from_u8(value: u8) -> Option<Kind> {
                match value { $($number => Some(Kind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    Context = 1,
    Module = 2,
    Function = 3,
    Library = 4,
    Kernel = 5,
    Stream = 6,
    Event = 7,
    Graph = 8,
    GraphNode = 9,
    GraphExec = 10,
    UserObject = 11,
    MemPool = 12,
    Allocation = 13,
    Array = 14,
    MipmappedArray = 15,
    Texture = 16,
    Surface = 17,
    TextureReference = 18,
    SurfaceReference = 19,
    Link = 20,
    GreenContext = 21,
    ResourceDescriptor = 22,
    External = 23,
    LogCallback = 24,
    AsyncCallback = 25,
}

/// Marks the upper bits of every handle: not a canonical x86-64 or AArch64 address.
const TAG: u64 = 0x5d << 56;

/// `tag:8 | kind:8 | generation:16 | index:32`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(pub u64);

impl Handle {
    /// Puts a handle together.
    pub const fn new(kind: Kind, generation: u16, index: u32) -> Handle {
        Handle(TAG | (kind as u64) << 48 | (generation as u64) << 32 | index as u64)
    }
    /// The kind, when this is a handle at all.
    pub fn kind(self) -> Option<Kind> {
        if self.0 >> 56 != TAG >> 56 {
            None
        } else {
            Kind::from_u8((self.0 >> 48) as u8)
        }
    }
    /// Position in the table of its kind.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }
    /// How often the position was used before.
    pub const fn generation(self) -> u16 {
        (self.0 >> 32) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_survive() {
        let handle = Handle::new(Kind::Event, 0xbeef, 0x1234_5678);
        assert_eq!(handle.kind(), Some(Kind::Event));
        assert_eq!(handle.generation(), 0xbeef);
        assert_eq!(handle.index(), 0x1234_5678);
    }

    #[test]
    fn other_values_are_no_handles() {
        for value in [0, 1, 2, 0x7fff_1234_5678, u64::MAX, TAG, TAG | 0x63 << 48] {
            assert_eq!(Handle(value).kind(), None, "{value:#x}");
        }
    }

    #[test]
    fn a_stale_handle_differs_from_its_successor() {
        let first = Handle::new(Kind::Stream, 0, 7);
        let others = [
            Handle::new(Kind::Stream, 1, 7),
            Handle::new(Kind::Event, 0, 7),
            Handle::new(Kind::Stream, 0, 8),
        ];
        for other in others {
            assert_ne!(first, other);
        }
        assert_eq!(first, Handle(0x5d06_0000_0000_0007));
    }
}
