//! Each scenario is reproducible, passes, and is able to fail.

use std::ops::Range;

use farpool_sim::{Scenario, find_scenario, hunt, run_guarded, sweep};

/// Enough seeds to see every kind of fault of a scenario; `farpool sim` runs ten thousand.
const SEEDS: u64 = 150;
/// Other seeds, for `make mutants`: `FARPOOL_SIM_SEEDS=1000` asks for that many, `FARPOOL_SIM_SEEDS=3,17,`
/// for these.
const SEEDS_OPTION: &str = "FARPOOL_SIM_SEEDS";
/// Each mutation must be noticed within this many seeds, as for `farpool sim`.
const HUNTED_SEEDS: u64 = 5_000;
/// Seeds that are run twice; each mutation is run twice with one seed.
const REPEATED_SEEDS: u64 = 5;
const THREADS: usize = 2;

fn scenario(name: &str) -> &'static Scenario {
    find_scenario(name).expect("a scenario of this crate")
}

fn one_seed_is_one_history(name: &str) {
    let scenario = scenario(name);
    let sound = (0..REPEATED_SEEDS).map(|seed| (seed, None));
    let broken = (0..).zip(scenario.mutations.iter().copied().map(Some));
    for (seed, mutation) in sound.chain(broken) {
        let once = run_guarded(scenario, seed, mutation, false);
        let again = run_guarded(scenario, seed, mutation, true);
        assert_eq!(once.trace_hash, again.trace_hash, "seed {seed}, {mutation:?}");
        assert_eq!(once.violations, again.violations, "seed {seed}, {mutation:?}");
        assert!(!again.trace.is_empty());
    }
    let (one, other) = (run_guarded(scenario, 1, None, false), run_guarded(scenario, 2, None, false));
    assert_ne!(one.trace_hash, other.trace_hash);
}

fn seeds_are_green(name: &str) {
    let asked = std::env::var(SEEDS_OPTION).unwrap_or(SEEDS.to_string());
    let number = |seeds: &str| seeds.parse::<u64>().expect("a number");
    if let Some((first, others)) = asked.split_once(',') {
        let listed = others.split_terminator(',').chain([first]);
        listed.for_each(|seed| range_is_green(name, number(seed)..number(seed) + 1));
    } else {
        range_is_green(name, 0..number(&asked));
    }
}

fn range_is_green(name: &str, seeds: Range<u64>) {
    let swept = sweep(scenario(name), seeds.clone(), THREADS, &|| {});
    assert_eq!(swept.seeds, seeds.end - seeds.start);
    let failed: Vec<_> = swept.failures.iter().map(|failure| (failure.seed, &failure.violations)).collect();
    assert!(failed.is_empty(), "replay with `farpool sim {name} --seed N`: {failed:#?}");
}

fn every_mutation_is_caught(name: &str) {
    let scenario = scenario(name);
    for mutation in scenario.mutations {
        let catch = hunt(scenario, mutation, 0..HUNTED_SEEDS, 1, THREADS, &|| {});
        assert!(!catch.caught_by.is_empty(), "{mutation} went unnoticed in {} seeds", catch.seeds_run);
    }
}

macro_rules! scenarios {
    ($($name:ident),*) => {
        $(mod $name {
            #[test]
            fn one_seed_is_one_history() {
                super::one_seed_is_one_history(stringify!($name));
            }

            #[test]
            fn seeds_are_green() {
                super::seeds_are_green(stringify!($name));
            }

            #[test]
            fn every_mutation_is_caught() {
                super::every_mutation_is_caught(stringify!($name));
            }
        })*
    };
}

scenarios!(fabric, pool, file, txn, hash, index, members, cache);
