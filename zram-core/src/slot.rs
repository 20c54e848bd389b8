//! The state of one slot and its packing into one 64-bit word. No memory order here: see `table.rs`.
//!
//! ```text
//!  63  60 59 58 57                      22 21      10 9  8  7 6      0
//! +------+-----+--------------------------+----------+----+---+-------+
//! |  0   |  0  |                            0                         |  empty
//! |  0   |  1  | granule of the object    | length-1 |   flags (*)    |  stored
//! |  0   |  2  | granule of the value     |            0              |  same-filled, the value is an object
//! | != 0 |              value XOR 0xb << 60                           |  same-filled, the value is here
//! +------+------------------------------------------------------------+
//! (*) 9..8 priority, 7 incompressible, 6 idle, 5..0 age (`idle.rs`)
//! ```
//!
//! A word that only says "same-filled" would leave no room for the value. But a stored slot needs 60 bits, so only one
//! sixteenth of all words: the others are the values themselves, with the top four bits turned so that the values that
//! do not fit are those that begin with 0xb, which neither small numbers, text, pointers of either half nor the usual
//! fill patterns do. These few cost an object of 8 bytes.
//!
//! A length of 4,096 says that the page is kept whole: it is huge, in zram's words.

use crate::page::PAGE_SIZE;

/// Bytes in a granule, the unit of places in the arena.
pub(crate) const GRANULE_SIZE: usize = 8;
/// Granules that a slot's word can name: 512 GiB of arena.
pub(crate) const GRANULES_MAX: u64 = 1 << GRANULE_BITS;

const GRANULE_BITS: u32 = 36;
const GRANULE_SHIFT: u32 = 22;
const LENGTH_SHIFT: u32 = 10;
const LENGTH_MASK: u64 = 0xfff;
const KIND_SHIFT: u32 = 58;
const TAG_SHIFT: u32 = 60;
/// Turns the values that do not fit away from the common ones.
const VALUE_TWIST: u64 = 0xb << TAG_SHIFT;

const KIND_STORED: u64 = 1;
const KIND_VALUE_OBJECT: u64 = 2;

const _: () = assert!(PAGE_SIZE - 1 <= LENGTH_MASK as usize);
const _: () = assert!(GRANULE_SHIFT + GRANULE_BITS == KIND_SHIFT);

/// The index of a page on the disk: its byte offset is this times 4,096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(pub u32);

/// A place in the arena: the granule at which an object begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(u64);

impl Handle {
    pub(crate) fn from_granule(granule: u64) -> Handle {
        assert!(granule < GRANULES_MAX, "granule {granule} does not fit a slot");
        Handle(granule)
    }

    pub(crate) fn granule(self) -> u64 {
        self.0
    }

    /// Offset in the arena.
    pub(crate) fn byte(self) -> u64 {
        self.0 * GRANULE_SIZE as u64
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Never written, or discarded: reads as zeroes.
    Empty,
    /// Every word of the page is this one.
    SameFilled(u64),
    /// Every word of the page is the one kept at the handle.
    SameFilledObject(Handle),
    /// `len` bytes of content at the handle; 1 to 4,096, and 4,096 means the page itself.
    Stored {
        /// Where the object begins.
        handle: Handle,
        /// Bytes of content.
        len: usize,
        /// Which of the disk's algorithms made it, 0 to 3. Of no meaning when it is the page itself.
        priority: u8,
    },
}

/// Classes of age.
pub(crate) const AGE_CLASSES: usize = 1 << AGE_BITS;
const AGE_BITS: u32 = 6;
const AGE_MASK: u64 = (1 << AGE_BITS) - 1;
const IDLE: u64 = 1 << 6;
const INCOMPRESSIBLE: u64 = 1 << 7;
const PRIORITY_SHIFT: u32 = 8;
const PRIORITY_MASK: u64 = 3;
/// What a read or a write sets to 0.
const USE_FLAGS: u64 = AGE_MASK | IDLE;

fn is_stored(word: u64) -> bool {
    word >> KIND_SHIFT == KIND_STORED
}

/// The class of age of a stored page; other slots have none.
pub(crate) fn age(word: u64) -> Option<u8> {
    is_stored(word).then_some((word & AGE_MASK) as u8)
}

/// A stored page's word with another class of age.
pub(crate) fn with_age(word: u64, class: u8) -> u64 {
    word & !AGE_MASK | u64::from(class)
}

/// A stored page's word with the mark, or without.
pub(crate) fn with_idle(word: u64, is_idle: bool) -> u64 {
    if is_idle { word | IDLE } else { word & !IDLE }
}

pub(crate) fn is_idle(word: u64) -> bool {
    is_stored(word) && word & IDLE != 0
}

/// A slot's word after its page was used: young and not idle.
pub(crate) fn used(word: u64) -> u64 {
    if is_stored(word) { word & !USE_FLAGS } else { word }
}

/// Whether two words say the same of the same object, flags of its use apart.
pub(crate) fn is_same_object(one: u64, other: u64) -> bool {
    one == other || is_stored(one) && (one ^ other) & !(USE_FLAGS | INCOMPRESSIBLE) == 0
}

/// A stored page's word that says that no algorithm gains anything.
pub(crate) fn incompressible(word: u64) -> u64 {
    word | INCOMPRESSIBLE
}

pub(crate) fn is_incompressible(word: u64) -> bool {
    is_stored(word) && word & INCOMPRESSIBLE != 0
}

/// A slot's word that says the same of an object at another place.
pub(crate) fn moved(word: u64, to: Handle) -> u64 {
    word & !((GRANULES_MAX - 1) << GRANULE_SHIFT) | to.0 << GRANULE_SHIFT
}

impl Slot {
    /// The word of an empty slot, and of memory never touched.
    pub(crate) const EMPTY: u64 = 0;

    /// The slot that keeps `value` in its word, when it fits.
    pub(crate) fn same_filled(value: u64) -> Option<Slot> {
        ((value ^ VALUE_TWIST) >> TAG_SHIFT != 0).then_some(Slot::SameFilled(value))
    }

    pub(crate) fn pack(self) -> u64 {
        match self {
            Slot::Empty => Slot::EMPTY,
            Slot::SameFilled(value) => {
                let word = value ^ VALUE_TWIST;
                assert!(word >> TAG_SHIFT != 0, "value {value:#x} does not fit its slot");
                word
            }
            Slot::SameFilledObject(handle) => KIND_VALUE_OBJECT << KIND_SHIFT | handle.0 << GRANULE_SHIFT,
            Slot::Stored { handle, len, priority } => {
                assert!((1..=PAGE_SIZE).contains(&len), "length {len} does not fit a slot");
                assert!(
                    u64::from(priority) <= PRIORITY_MASK,
                    "priority {priority} does not fit a slot"
                );
                let (len, priority) = ((len - 1) as u64, u64::from(priority));
                KIND_STORED << KIND_SHIFT | handle.0 << GRANULE_SHIFT | len << LENGTH_SHIFT | priority << PRIORITY_SHIFT
            }
        }
    }

    /// Whether a word of unknown origin is one that `pack` makes.
    pub(crate) fn is_valid(word: u64) -> bool {
        match (word >> TAG_SHIFT, word >> KIND_SHIFT) {
            (0, KIND_STORED) => true,
            (0, KIND_VALUE_OBJECT) => word & ((1 << GRANULE_SHIFT) - 1) == 0,
            (0, _) => word == Slot::EMPTY,
            _ => true,
        }
    }

    pub(crate) fn unpack(word: u64) -> Slot {
        if word >> TAG_SHIFT != 0 {
            return Slot::SameFilled(word ^ VALUE_TWIST);
        }
        let handle = Handle(word >> GRANULE_SHIFT & (GRANULES_MAX - 1));
        match word >> KIND_SHIFT {
            KIND_STORED => Slot::Stored {
                handle,
                len: (word >> LENGTH_SHIFT & LENGTH_MASK) as usize + 1,
                priority: (word >> PRIORITY_SHIFT & PRIORITY_MASK) as u8,
            },
            KIND_VALUE_OBJECT => Slot::SameFilledObject(handle),
            _ => {
                assert!(word == Slot::EMPTY, "{word:#x} is no slot");
                Slot::Empty
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_never_touched_is_empty_slots() {
        assert_eq!(Slot::unpack(0), Slot::Empty);
        assert_eq!(Slot::Empty.pack(), 0);
    }

    #[test]
    fn the_ends_of_every_field_survive_packing() {
        for granule in [0, 1, GRANULES_MAX - 1] {
            let handle = Handle::from_granule(granule);
            for len in [1, 2, PAGE_SIZE - 1, PAGE_SIZE] {
                for priority in 0..4 {
                    let slot = Slot::Stored { handle, len, priority };
                    assert_eq!(Slot::unpack(slot.pack()), slot);
                }
            }
            let slot = Slot::SameFilledObject(handle);
            assert_eq!(Slot::unpack(slot.pack()), slot);
        }
    }

    #[test]
    fn a_moved_object_changes_its_place_and_nothing_else() {
        let (from, to) = (Handle::from_granule(GRANULES_MAX - 1), Handle::from_granule(12_345));
        for len in [1, 777, PAGE_SIZE] {
            let stored = |handle| Slot::Stored {
                handle,
                len,
                priority: 3,
            };
            let word = stored(from).pack() | 0x3ff; // all flags
            let new = moved(word, to);
            assert_eq!(Slot::unpack(new), stored(to));
            assert_eq!(moved(new, from), word);
        }
        let value = Slot::SameFilledObject(from).pack();
        assert_eq!(Slot::unpack(moved(value, to)), Slot::SameFilledObject(to));
    }

    #[test]
    fn flags_are_apart_from_each_other_and_from_the_object() {
        let slot = Slot::Stored {
            handle: Handle::from_granule(77),
            len: 1234,
            priority: 2,
        };
        let word = incompressible(with_idle(with_age(slot.pack(), 63), true));
        assert_eq!(Slot::unpack(word), slot);
        assert!(is_idle(word) && is_incompressible(word) && age(word) == Some(63));
        assert_eq!(used(word), incompressible(slot.pack()));
        assert_eq!(with_idle(with_age(word, 0), false), used(word));
        for other in [Slot::EMPTY, Slot::SameFilled(u64::MAX).pack()] {
            assert_eq!((age(other), used(other)), (None, other));
            assert!(!is_idle(other) && !is_incompressible(other));
        }
    }

    #[test]
    fn words_that_no_slot_packs_to_are_known() {
        for word in [1, 1 << 22, 3 << KIND_SHIFT, KIND_VALUE_OBJECT << KIND_SHIFT | 1] {
            assert!(!Slot::is_valid(word), "{word:#x}");
        }
        for word in [
            0,
            1 << 60,
            u64::MAX,
            KIND_STORED << KIND_SHIFT | 0x3ff,
            KIND_VALUE_OBJECT << KIND_SHIFT,
        ] {
            assert!(Slot::is_valid(word), "{word:#x}");
        }
    }

    #[test]
    fn common_values_fit_the_word() {
        let repeated = (0..=255u8).map(|b| u64::from_ne_bytes([b; 8]));
        for value in repeated.chain([
            1,
            u64::MAX,
            0x7fff_ffff_ffff,
            0xffff_8000_0000_0000,
            0xdead_beef_dead_beef,
        ]) {
            let fits = value >> 60 != 0xb;
            assert_eq!(Slot::same_filled(value).is_some(), fits, "{value:#x}");
        }
    }

    proptest! {
        #[test]
        fn a_value_that_fits_survives_packing(value: u64) {
            match Slot::same_filled(value) {
                Some(slot) => prop_assert_eq!(Slot::unpack(slot.pack()), Slot::SameFilled(value)),
                None => prop_assert_eq!(value >> 60, 0xb),
            }
        }
    }
}
