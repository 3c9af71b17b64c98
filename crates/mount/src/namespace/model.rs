//! The namespace against a model that counts everything from scratch after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::time::SystemTime;

use proptest::prelude::*;

use super::*;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const NOW: SystemTime = SystemTime::UNIX_EPOCH;
const OWN: Ownership = Ownership { mode: 0o755, uid: 0, gid: 0 };

/// Inodes are picked by the order in which they were made, modulo their number.
#[derive(Clone, Debug)]
enum Step {
    MakeFile(usize, usize),
    MakeDirectory(usize, usize),
    Link(usize, usize, usize),
    Unlink(usize, usize),
    Rmdir(usize, usize),
    Rename(usize, usize, usize, usize, RenameMode),
    Open(usize),
    Release(usize),
    Forget(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (ino, name) = (0..24usize, 0..NAMES.len());
    let mode =
        prop_oneof![Just(RenameMode::Replace), Just(RenameMode::NoReplace), Just(RenameMode::Exchange)];
    prop_oneof![
        3 => (ino.clone(), name.clone()).prop_map(|(dir, name)| Step::MakeFile(dir, name)),
        3 => (ino.clone(), name.clone()).prop_map(|(dir, name)| Step::MakeDirectory(dir, name)),
        2 => (ino.clone(), ino.clone(), name.clone()).prop_map(|(ino, dir, name)| Step::Link(ino, dir, name)),
        3 => (ino.clone(), name.clone()).prop_map(|(dir, name)| Step::Unlink(dir, name)),
        2 => (ino.clone(), name.clone()).prop_map(|(dir, name)| Step::Rmdir(dir, name)),
        5 => (ino.clone(), name.clone(), ino.clone(), name, mode)
            .prop_map(|(from, old, to, new, mode)| Step::Rename(from, old, to, new, mode)),
        2 => ino.clone().prop_map(Step::Open),
        2 => ino.clone().prop_map(Step::Release),
        2 => ino.prop_map(Step::Forget),
    ]
}

/// The expected state in its simplest form: which inodes are directories, which names exist, how often each
/// inode is held.
#[derive(Default)]
struct Model {
    made: Vec<Ino>,
    directories: BTreeSet<Ino>,
    entries: BTreeMap<(Ino, OsString), Ino>,
    held: BTreeMap<Ino, (u64, u32)>,
}

impl Model {
    fn pick(&self, index: usize) -> Ino {
        self.made[index % self.made.len()]
    }

    fn names_of(&self, ino: Ino) -> usize {
        self.entries.values().filter(|&&named| named == ino).count()
    }

    fn children(&self, directory: Ino) -> impl Iterator<Item = Ino> {
        self.entries.iter().filter(move |((parent, _), _)| *parent == directory).map(|(_, &ino)| ino)
    }

    fn is_below(&self, ino: Ino, above: Ino) -> bool {
        ino == above || self.children(above).any(|child| self.is_below(ino, child))
    }

    fn alive(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || self.names_of(ino) > 0 || self.held.get(&ino).is_some_and(|&held| held != (0, 0))
    }

    fn may_add(&self, directory: Ino, name: &OsStr) -> bool {
        self.directories.contains(&directory)
            && (directory == Ino::ROOT || self.names_of(directory) > 0)
            && !self.entries.contains_key(&(directory, name.to_owned()))
    }

    fn may_rename(&self, from: &(Ino, OsString), to: &(Ino, OsString), mode: RenameMode) -> bool {
        let Some(&moved) = self.entries.get(from) else { return false };
        let there = self.entries.get(to).copied();
        let target_alive = self.directories.contains(&to.0) && (to.0 == Ino::ROOT || self.names_of(to.0) > 0);
        let is_directory = |ino| self.directories.contains(&ino);
        let fits = match (mode, there) {
            (RenameMode::NoReplace, there) => there.is_none(),
            (RenameMode::Exchange, None) => false,
            (RenameMode::Exchange, Some(other)) => !is_directory(other) || !self.is_below(from.0, other),
            (RenameMode::Replace, None) => true,
            (RenameMode::Replace, Some(other)) => {
                other == moved
                    || (is_directory(moved) == is_directory(other) && self.children(other).next().is_none())
            }
        };
        target_alive && fits && !(is_directory(moved) && self.is_below(to.0, moved))
    }

    fn rename(&mut self, from: (Ino, OsString), to: (Ino, OsString), mode: RenameMode) {
        let moved = self.entries[&from];
        match self.entries.get(&to).copied() {
            Some(other) if other == moved => {}
            Some(other) if mode == RenameMode::Exchange => {
                self.entries.insert(from, other);
                self.entries.insert(to, moved);
            }
            _ => {
                self.entries.remove(&from);
                self.entries.insert(to, moved);
            }
        }
    }
}

/// Runs a step on both; the namespace must succeed exactly if the model says so.
fn run(space: &mut Namespace<usize>, model: &mut Model, step: Step) {
    match step {
        Step::MakeFile(dir, name) | Step::MakeDirectory(dir, name) => {
            let (dir, name) = (model.pick(dir), OsStr::new(NAMES[name]));
            let is_directory = matches!(step, Step::MakeDirectory(..));
            let kind = if is_directory { Kind::Directory } else { Kind::File(model.made.len()) };
            let made = space.make(dir, name, kind, OWN, NOW);
            assert_eq!(made.is_ok(), model.may_add(dir, name));
            if let Ok(ino) = made {
                space.remember(ino).unwrap();
                model.made.push(ino);
                model.held.insert(ino, (1, 0));
                model.entries.insert((dir, name.to_owned()), ino);
                if is_directory {
                    model.directories.insert(ino);
                }
            }
        }
        Step::Link(ino, dir, name) => {
            let (ino, dir, name) = (model.pick(ino), model.pick(dir), OsStr::new(NAMES[name]));
            let linked = space.link(ino, dir, name, NOW);
            let may = !model.directories.contains(&ino) && model.names_of(ino) > 0;
            assert_eq!(linked.is_ok(), may && model.may_add(dir, name));
            if linked.is_ok() {
                model.entries.insert((dir, name.to_owned()), ino);
            }
        }
        Step::Unlink(dir, name) | Step::Rmdir(dir, name) => {
            let place = (model.pick(dir), OsString::from(NAMES[name]));
            let victim = model.entries.get(&place).copied();
            let (done, may) = if matches!(step, Step::Unlink(..)) {
                let may = victim.is_some_and(|ino| !model.directories.contains(&ino));
                (space.unlink(place.0, &place.1, NOW).map(drop), may)
            } else {
                let may = victim.is_some_and(|ino| {
                    model.directories.contains(&ino) && model.children(ino).next().is_none()
                });
                (space.rmdir(place.0, &place.1, NOW), may)
            };
            assert_eq!(done.is_ok(), may);
            if may {
                model.entries.remove(&place);
            }
        }
        Step::Rename(from, old, to, new, mode) => {
            let (from, to) =
                ((model.pick(from), NAMES[old].into()), (model.pick(to), OsString::from(NAMES[new])));
            let done = space.rename((from.0, OsStr::new(&from.1)), (to.0, &to.1), mode, NOW);
            assert_eq!(done.is_ok(), model.may_rename(&from, &to, mode), "{done:?}");
            if done.is_ok() {
                model.rename(from, to, mode);
            }
        }
        Step::Open(ino) => {
            let ino = model.pick(ino);
            let may = model.alive(ino) && !model.directories.contains(&ino);
            assert_eq!(space.open(ino).is_ok(), may);
            if may {
                model.held.entry(ino).or_default().1 += 1;
            }
        }
        Step::Release(ino) | Step::Forget(ino) => {
            let ino = model.pick(ino);
            let held = model.held.entry(ino).or_default();
            let release = matches!(step, Step::Release(..));
            if release && held.1 > 0 {
                held.1 -= 1;
                let _ = space.release(ino);
            } else if !release && held.0 > 0 {
                held.0 -= 1;
                let _ = space.forget(ino, 1);
            }
        }
    }
}

/// N1 to N3, counted from scratch.
fn check(space: &Namespace<usize>, model: &Model) {
    let alive: Vec<Ino> = model.made.iter().copied().filter(|&ino| model.alive(ino)).collect();
    assert_eq!(space.inodes(), alive.len(), "an inode lives on, or ended too early");
    assert_eq!(space.names, model.entries.len());
    space.check_account();
    for &ino in &alive {
        let subdirectories = model.children(ino).filter(|child| model.directories.contains(child)).count();
        let nlink = match model.directories.contains(&ino) {
            true if ino == Ino::ROOT || model.names_of(ino) > 0 => 2 + subdirectories,
            true => 0,
            false => model.names_of(ino),
        };
        assert_eq!(space.attributes(ino).unwrap().nlink as usize, nlink, "links of {ino:?}");
        if model.directories.contains(&ino) {
            let listed: BTreeMap<OsString, Ino> =
                space.entries(ino, 2).unwrap().map(|entry| (entry.name.to_owned(), entry.ino)).collect();
            let expected = model.entries.iter().filter(|((parent, _), _)| *parent == ino);
            assert_eq!(listed, expected.map(|((_, name), &ino)| (name.clone(), ino)).collect());
            for (name, child) in listed {
                assert_eq!(space.find(ino, &name), Ok(child));
                if let Ok(directory) = space.directory(child) {
                    assert_eq!(directory.parent, ino);
                }
            }
        } else {
            let named_or_held = model.names_of(ino) > 0 || model.held[&ino] != (0, 0);
            assert!(named_or_held);
        }
        if model.names_of(ino) > 0 {
            assert!(model.is_below(ino, Ino::ROOT), "{ino:?} has a name that no path reaches");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn links_and_lifetimes_agree_with_a_recount_after_every_step(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut space = Namespace::new(OWN, NOW, MAX_INODES);
        let mut model = Model { made: vec![Ino::ROOT], ..Model::default() };
        model.directories.insert(Ino::ROOT);
        for step in steps {
            run(&mut space, &mut model, step);
            check(&space, &model);
        }
    }
}
