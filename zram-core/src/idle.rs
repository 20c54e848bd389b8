//! How long ago a page was read or written, and the mark on idle ones.
//!
//! A slot's word has an age of 6 bits, a class, and one bit for the mark. Whoever reads or writes a page sets both to 0,
//! and only if they are not 0 already: so a busy page costs nothing, and an idle one an exchange at its first read. A walk
//! through the table, every ten seconds while pages are used, moves every class on by the time that passed. A class `c`
//! says "at least [`age_of`] `c`": ten-second steps at first, then longer ones, a day and more at the end.
//!
//! The exchanges here change nothing but these bits, and when one fails the page was used or moved meanwhile: then
//! there is nothing to do.

use std::time::Duration;

use crate::slot::{self, AGE_CLASSES};
use crate::table::Table;

/// The least time between two walks.
pub(crate) const TICK: Duration = Duration::from_secs(TICK_SECS);
const TICK_SECS: u64 = 10;
/// Classes of one width; then the width doubles.
const CLASSES_A_WIDTH: usize = 5;

/// Which pages get the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleMark {
    /// All that are stored.
    All,
    /// Those that nobody read or wrote for so long, up to [`IDLE_AGE_MAX`]; the others lose it.
    Age(Duration),
}

/// The most that is known of a page's age: of older ones it is known that they are at least so old. Some 79 hours.
pub const IDLE_AGE_MAX: Duration = age_of(AGE_CLASSES - 1);

/// Seconds that a page stays in a class.
const fn width(class: usize) -> u64 {
    TICK_SECS << (class / CLASSES_A_WIDTH)
}

/// The least time since a page in this class was used.
pub(crate) const fn age_of(class: usize) -> Duration {
    // A page enters class 1 at a walk, and a class after it when the clock passes a multiple of the width of the class
    // before; it leaves it at the next multiple of its own width: where the width doubles after half of it.
    let (mut secs, mut before) = (0, 1);
    while before + 1 < class {
        secs += width(before);
        before += 1;
    }
    Duration::from_secs(secs)
}

/// What becomes of each class from one walk to the next. A page in class 0 was used in between, nobody knows when: it goes
/// to class 1, which says nothing of its age yet, and so that its next use is seen.
fn aged(from: Duration, to: Duration) -> [u8; AGE_CLASSES] {
    std::array::from_fn(|class| {
        if class == 0 {
            return 1;
        }
        let (mut class, mut at) = (class, from.as_secs());
        while class + 1 < AGE_CLASSES {
            at = (at / width(class) + 1) * width(class);
            if at > to.as_secs() {
                break;
            }
            class += 1;
        }
        class as u8
    })
}

/// Moves all ages on from the time of the last walk to now, both since any one moment.
pub(crate) fn tick(table: &Table, from: Duration, to: Duration) {
    let aged = aged(from, to);
    for (index, word) in table.walk(0..table.slots()) {
        if let Some(class) = slot::age(word) {
            let new = slot::with_age(word, aged[usize::from(class)]);
            if new != word {
                table.change_flags(index, word, new);
            }
        }
    }
}

/// Sets and takes away marks; how many pages have one now.
pub(crate) fn mark(table: &Table, mark: IdleMark) -> u64 {
    let mut marked = 0;
    for (index, word) in table.walk(0..table.slots()) {
        let Some(class) = slot::age(word) else { continue };
        let is_idle = match mark {
            IdleMark::All => true,
            IdleMark::Age(age) => age_of(class.into()) >= age,
        };
        let new = slot::with_idle(word, is_idle);
        let is_there = new == word || table.change_flags(index, word, new);
        marked += u64::from(is_idle && is_there);
    }
    marked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::OS_PAGE_SIZE;
    use crate::slot::{Handle, Slot, SlotIndex};

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn word(len: usize) -> u64 {
        Slot::Stored {
            handle: Handle::from_granule(5),
            len,
            priority: 2,
        }
        .pack()
    }

    fn table(words: &[u64]) -> Table {
        let table = Table::new("idle", words.len() as u64, words.len() as u64, &[0; OS_PAGE_SIZE]).unwrap();
        for (index, &word) in words.iter().enumerate() {
            let _ = table.swap(SlotIndex(index as u32), word);
        }
        table
    }

    fn load(table: &Table, index: u32) -> u64 {
        table.load(SlotIndex(index))
    }

    #[test]
    fn classes_grow_to_days() {
        assert_eq!(
            [0, 1, 2, 3, 4].map(age_of),
            [secs(0), secs(0), secs(0), secs(10), secs(20)]
        );
        assert!((1..AGE_CLASSES).all(|class| age_of(class) >= age_of(class - 1)));
        assert!(
            age_of(AGE_CLASSES - 1) > secs(24 * 3600),
            "{:?}",
            age_of(AGE_CLASSES - 1)
        );
    }

    /// Whenever walks happen, a page is never taken for older than it is, nor for less than a third of its age and a step.
    #[test]
    fn an_age_is_never_too_high_and_not_much_too_low() {
        for used_at in [0, 1, 9, 10, 11, 777] {
            for period in [10, 11, 13, 37, 60, 3600, 86_400] {
                let mut class = usize::from(aged(secs(0), secs(used_at))[0]);
                for walk in 1..400 {
                    let (from, to) = (secs(used_at + (walk - 1) * period), secs(used_at + walk * period));
                    class = usize::from(aged(from, to)[class]);
                    let (age, said) = (secs(walk * period), age_of(class));
                    assert!(said <= age, "used at {used_at}, {age:?} old, taken for {said:?}");
                    if class + 1 < AGE_CLASSES {
                        let least = age.saturating_sub(secs(2 * width(class))) / 3;
                        assert!(said >= least, "used at {used_at}, {age:?} old, taken for {said:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_walk_ages_stored_pages_and_nothing_else() {
        let words = [
            word(100),
            Slot::EMPTY,
            Slot::SameFilled(7).pack(),
            slot::with_age(word(7), 63),
        ];
        let table = table(&words);
        tick(&table, secs(0), secs(25));
        assert_eq!(slot::age(load(&table, 0)), Some(1), "used at some time before the walk");
        tick(&table, secs(25), secs(45));
        let expected = slot::with_age(word(100), 3);
        assert_eq!(load(&table, 0), expected, "and nothing else of the word");
        assert_eq!(
            [1, 2, 3].map(|index| load(&table, index)),
            [words[1], words[2], words[3]]
        );
        tick(&table, secs(45), secs(49));
        assert_eq!(slot::age(load(&table, 0)), Some(3));
    }

    /// The walk comes long after the last one, because nobody used anything, and then somebody did.
    #[test]
    fn a_page_used_after_a_long_rest_is_young() {
        let table = table(&[word(100), slot::with_age(word(100), 1)]);
        tick(&table, secs(100), secs(100_000));
        assert_eq!(mark(&table, IdleMark::Age(secs(20))), 1);
        assert!(!slot::is_idle(load(&table, 0)) && slot::is_idle(load(&table, 1)));
    }

    #[test]
    fn marks_by_age_are_set_and_taken_away() {
        let young = slot::with_idle(slot::with_age(word(100), 3), true);
        let old = slot::with_age(word(200), 20);
        let table = table(&[young, old, Slot::SameFilled(7).pack()]);
        assert_eq!(mark(&table, IdleMark::Age(age_of(3) + secs(1))), 1);
        assert!(!slot::is_idle(load(&table, 0)) && slot::is_idle(load(&table, 1)));
        assert_eq!(
            mark(&table, IdleMark::Age(age_of(20) + secs(1))),
            0,
            "nothing is as old"
        );
        assert!(!slot::is_idle(load(&table, 1)));
        assert_eq!(mark(&table, IdleMark::Age(secs(0))), 2, "everything is");
        assert_eq!(mark(&table, IdleMark::All), 2);
        assert!(slot::is_idle(load(&table, 0)) && !slot::is_idle(load(&table, 2)));
    }

    #[test]
    fn an_age_beyond_all_classes_marks_nothing() {
        let table = table(&[slot::with_age(word(1), 63)]);
        assert_eq!(mark(&table, IdleMark::Age(Duration::MAX)), 0);
    }
}
