"""Every broken plugin is caught, by one check, which names the cause and says what to do."""

import functools
import importlib
import inspect
import sys
from pathlib import Path

import pytest

from ringlet.compressors import Compressor
from ringlet.compressors.testing import all_checks, check_compressor
from ringlet.compressors.testing.checks.program import known_surroundings
from ringlet.compressors.testing.runner import failures_of

sys.path.insert(0, str(Path(__file__).parent))

# By module and class: the check that fails; where a mistake breaks two promises, both.
CAUGHT = {
    "claims": {
        "OmegaOfGaussians": "unbiased",
        "DeltaOfGaussians": "contraction",
        "OmegaOfSmallTensors": "unbiased",
        "NearestIsUnbiased": "unbiased",
        "TruncatesNegatives": "unbiased",
        "EpsilonInScale": "scales_with_its_values",
        "AbsoluteStep": "scales_with_its_values",
        "HalfScale": "scales_with_its_values",
        "CubesOverflow": "scales_with_its_values",
        "ClipsAtOne": "non_finite_stays_visible",
        "ThresholdOfOne": "scales_with_its_values",
        "WrongWay": "points_the_same_way",
        "BitsReversed": "points_the_same_way",
        "ForgetsScale": "scales_with_its_values",
        "LargestWraps": "points_the_same_way",
        "ShiftedByOne": "points_the_same_way",
        "TripleStrength": "feedback_stays_bounded",
        "HidesDivergence": "feedback_stays_bounded",
        "PaddedMean": "padding_does_not_leak",
        "PaddedRange": "padding_does_not_leak",
        "CodesAddUp": "sums_on_the_wire",
        "RootsAddUp": "sums_on_the_wire",
        "CutsAnywhere": "granularity",
        "ScalePerTensorCut": "granularity",
        "OmegaBelowHalfSteps": "unbiased",
        "DeltaOfOneSize": "contraction",
        "PredividesTwice": "mean_of_equal_gradients",
    },
    "wire": {
        "NarrowIndices": "large_tensors",
        "NarrowGaps": "large_tensors",
        "NarrowSums": "large_tensors",
        "FloatIndices": "large_tensors",
        "NarrowCount": "large_tensors",
        "BigEndian": "compresses_a_tensor",
        "DoubleScale": "compresses_a_tensor",
        "PlainNumber": "compresses_a_tensor",
        "NoDimension": "compresses_a_tensor",
        "Matrix": "compresses_a_tensor",
        "Complex": "compresses_a_tensor",
        "Tuple": "compresses_a_tensor",
        "LayoutTooSmall": "compresses_a_tensor",
        "LayoutOtherName": "compresses_a_tensor",
        "SizeByContent": "fixed_size",
        "UsesNumel": "granularity",
        "ChangesPayload": "compresses_a_tensor",
        "WrongChainedPart": "can_be_chained",
        "WrongChainedCount": "can_be_chained",
        "BlocksWithoutCount": "can_be_chained",
        "SizeAmongValues": "can_be_chained",
    },
    "memory": {
        "KeepsInput": "leaves_its_input_alone",
        "KeepsView": "leaves_its_input_alone",
        "KeepsPayload": "leaves_its_input_alone",
        "UndeclaredMemory": "memory_is_declared",
        "OneMemoryForAll": "deterministic",
        "MemoryByName": "deterministic",
        "KeepsGenerator": "resumes_from_a_checkpoint",
        "KeepsFunction": "resumes_from_a_checkpoint",
        "DecoderKnowsSender": "decoding_is_the_same_everywhere",
        "SideChannel": "another_process_agrees",
        "SharedScratch": "calls_may_interleave",
        "ChangesInput": "leaves_its_input_alone",
        "SortsInput": "leaves_its_input_alone",
        "ReturnsInput": "leaves_its_input_alone",
        "ReturnsScratch": "leaves_its_input_alone",
        "ScratchTwice": "deterministic",
        "StealsScratch": "feedback_telescopes",
        "ScratchNotCleared": "scratch_does_not_matter",
        "EmptyNotCleared": "scratch_does_not_matter",
        "OwnFeedbackTwice": "memory_is_declared",
        "ResidualOfPiece": "pieces_remember_their_own",
        "RemembersNaN": "one_overflow_is_survived",
        "CachesByStep": "deterministic",
        "Overshoots": "memory_stays_bounded",
        "RingOfBuffers": "leaves_its_input_alone",
        "SharedSum": "calls_may_interleave",
        "SilencesNumPy": "leaves_the_program_alone",
        "MaskOfAnotherTensor": "another_process_agrees",
    },
    "randomness": {
        "GlobalNoise": "deterministic",
        "ModuleNoise": "deterministic",
        "ClockNoise": "deterministic",
        "PythonNoise": "deterministic",
        "SeedOnly": "unbiased",
        "StepOnly": "noise_averages_out",
        "SharedNoise": "noise_averages_out",
        "OffsetForgotten": "granularity",
        "SketchByHash": "another_process_agrees",
        "SketchByProcess": "another_process_agrees",
        "SketchOfOneRank": "decoding_is_the_same_everywhere",
        "OrderOfASet": "another_process_agrees",
        "DitherOfReceiver": "decoding_is_the_same_everywhere",
        "ScheduleByChance": "schedule_goes_by_the_step",
        "SeedsTheProgram": "leaves_the_program_alone",
        "EverySecondStep": "noise_is_drawn_anew",
        "RankPlusStep": "noise_is_drawn_anew",
    },
    "edges": {
        "EmptyInput": "every_length",
        "OneElement": "every_length",
        "FewElements": "every_length",
        "TailLost": "the_last_element_counts",
        "LastElementLost": "the_last_element_counts",
        "AllZero": "extreme_values",
        "SwallowsNaN": "non_finite_stays_visible",
        "ClipsInf": "non_finite_stays_visible",
        "NaNNotLargest": "non_finite_stays_visible",
        "NaNBecomesAnything": "non_finite_stays_visible",
        "NotWritten": "compresses_a_tensor",
        "AddsToOut": "compresses_a_tensor",
        "HolesNotCleared": "compresses_a_tensor",
        "WantsShape": "compresses_a_tensor",
        "PieceInShape": "granularity",
        "HalvesSecondStage": "second_stage",
        "RangeOfOneRank": "second_stage",
        "SecondStageOtherLayout": "second_stage",
        "AccumulatesInDouble": "fast_paths_agree",
        "AccumulateOverwrites": "fast_paths_agree",
        "FastPathDiffers": "fast_paths_agree",
        "FeedbackForgetsDecay": "fused_feedback_agrees",
        "FeedbackOfInput": "fused_feedback_agrees",
        "FeedbackKeepsNaN": "fused_feedback_agrees",
        "FinishByRank": "replicas_agree",
        "ZerosBecomeOnes": "extreme_values",
        "ConstantIsLost": "every_element_has_its_turn",
        "LosesEveryHundredth": "every_element_has_its_turn",
        "LastCellWithoutScale": "the_last_element_counts",
        "NothingOfFew": "the_last_element_counts",
    },
    "declared": {
        "UnbiasedAttribute": "nothing_is_declared_in_vain",
        "StatefulAttribute": "nothing_is_declared_in_vain",
        "OmegaOption": "nothing_is_declared_in_vain",
        "CombineAttribute": "nothing_is_declared_in_vain",
        "TraitsValue": "traits_are_traits",
        "MinSizeAttribute": "nothing_is_declared_in_vain",
        "MisspeltHook": "nothing_is_declared_in_vain",
        "MisspeltFeedback": "nothing_is_declared_in_vain",
        "MisspeltTraits": "nothing_is_declared_in_vain",
        "EnumOption": "is_a_value",
        "DtypeOption": "is_a_value",
        "FunctionOption": "is_a_value",
        "RewritesOption": "is_a_value",
        "OwnText": "is_a_value",
        "LooksEqual": "is_a_value",
        "MisspeltDecoder": "nothing_is_declared_in_vain compresses_a_tensor",
        "FixedWithoutLayout": "traits_are_traits",
        "NegativeGranularity": "traits_are_traits",
        "UnknownCombine": "traits_are_traits",
        "SumOfTwoArrays": "traits_are_traits",
        "ImpossibleDelta": "traits_are_traits",
    },
    "rounds": {
        "LeaderChooses": "one_overflow_is_survived",
        "LeavesEarly": "every_rank_takes_part",
        "SecondRoundByOwnData": "every_rank_takes_part",
        "SizeByOwnData": "every_rank_takes_part",
        "YieldsScratch": "compresses_a_tensor",
        "SumNotDivided": "mean_of_equal_gradients",
        "OwnInsteadOfMean": "replicas_agree",
        "LocalOfNothing": "shares_make_the_mean",
        "LocalForgotten": "local_is_written",
        "NotInPlace": "results_may_replace_values",
        "KeepsReceived": "compresses_a_tensor",
        "NarrowSum": "every_length",
        "NoRound": "compresses_a_tensor",
        "NotAGenerator": "compresses_a_tensor",
        "SwallowsNaNInRounds": "non_finite_stays_visible",
        "ChangesInputForLocal": "local_is_written",
        "GivesAwayItsInput": "local_is_written",
        "ThreeTimes": "feedback_stays_bounded",
        "LocalOfEvenSteps": "shares_make_the_mean",
        "RoomForFew": "many_ranks",
        "NaNInMax": "one_overflow_is_survived",
        "UntilItConverges": "compresses_a_tensor",
    },
    "heldout": {
        "UnnamedUnits": "gradient_units",
        "LargestWithoutAbs": "both_signs_arrive",
        "KeepsOut": "leaves_its_input_alone",
        "ReshapesBySize": "every_length",
        "AlwaysTheSamePlaces": "every_element_has_its_turn",
        "StepIn16Bits": "late_steps_and_large_seeds",
        "SeedInOldGenerator": "late_steps_and_large_seeds",
        "ReusedPayload": "leaves_its_input_alone",
        "SumOfTwo": "fast_paths_agree",
        "SumOfFirst": "fast_paths_agree",
        "LayoutRoundsOtherwise": "every_length",
        "NothingAboveMean": "every_element_has_its_turn",
        "DividesBySizeItself": "mean_of_equal_gradients",
        "HistoryGrows": "memory_does_not_grow",
        "GrownTensor": "memory_fits_its_tensor",
        "HalfMemory": "scales_with_its_values",
        "DoubleRound": "compresses_a_tensor",
        "OwnScaleInRounds": "mean_of_ranks",
        "RoundMatrix": "compresses_a_tensor",
        "NamesLayers": "compresses_a_tensor",
        "PermutationOfFirstStep": "another_process_agrees",
        "PowerOfTwoScale": "points_the_same_way",
        "MedianScale": "points_the_same_way",
        "RankZeroSends": "mean_of_ranks",
        "MeanOfLocal": "shares_make_the_mean",
        "HalfOfLocal": "shares_make_the_mean",
        "SignOfStep": "points_the_same_way",
        "LargestOfFirstStep": "every_element_has_its_turn",
        "RoundsToEvenBlocks": "granularity",
        "AccumulateTwice": "fast_paths_agree",
        "NameInPayload": "deterministic",
        "ClaimsTooMuchDelta": "contraction",
    },
    "sizes": {
        "RestOfChunks": "every_part_of_a_large_tensor",
        "CellsIn16Bits": "every_part_of_a_large_tensor",
        "AddsWholePages": "fast_paths_agree",
        "KeepsWholePages": "fused_feedback_agrees",
        "MultipliesByInverse": "fast_paths_agree",
        "SumOfEight": "fast_paths_agree",
        "ShortIndices": "indices_are_wide_enough",
    },
    "states": {
        "LargestSoFar": "memory_is_declared",
        "LargestUnnamed": "gradient_units",
        "CutsMemory": "memory_fits_its_tensor",
        "MemoryInScratch": "leaves_its_input_alone",
        "KeepsPlaces": "memory_does_not_grow",
        "KeepsObjects": "resumes_from_a_checkpoint",
        "DoubleAverage": "gradient_units",
        "ConsolidatesInPlace": "memory_moves_to_other_ranks",
        "ConsolidatesAll": "memory_moves_to_other_ranks",
        "RegroupsWhatIsNot": "memory_moves_to_other_ranks",
        "WarmsUpWithoutValues": "memory_moves_to_other_ranks",
        "FollowsAlone": "one_overflow_is_survived",
        "RemembersNothingAtFirst": "deterministic",
        "HidesLaterOverflows": "one_overflow_is_survived",
        "ConsolidatesSums": "memory_moves_to_other_ranks",
        "ConsolidatesFirst": "memory_moves_to_other_ranks",
        "ConsolidatesWithoutALook": "memory_moves_to_other_ranks",
        "RegroupsWhatIsShared": "memory_moves_to_other_ranks",
    },
    "overridden": {
        "FeedbackOfTheMean": "feedback_in_rounds_agrees",
        "FeedbackOfOwnLoss": "feedback_in_rounds_agrees",
        "ForgetsWeight": "many_tensors_agree",
        "AccumulateForgetsOffset": "fast_paths_agree",
        "FusedForgetsOffset": "fused_feedback_agrees",
        "VaryingForgetsDecay": "many_varying_tensors_agree",
        "KeepsShortResiduals": "fused_feedback_agrees",
        "FinishesElsewhere": "every_length",
    },
    "values": {
        "HalvesBits": "non_finite_stays_visible",
        "LooksAtTheFirstPage": "non_finite_stays_visible",
        "LosesTheLast": "non_finite_stays_visible",
        "WrapsRound": "noise_at_its_ends",
        "ConstantsAreZero": "contraction",
        "NothingBelow": "contraction_at_every_size",
        "NearestInStageTwo": "unbiased",
        "EightBitsOfNoise": "unbiased",
        "NeverTheLast": "unbiased",
        "FloorOfAShare": "unbiased",
        "OneRunsNoise": "noise_is_drawn_anew",
        "OneLayersNoise": "noise_is_drawn_anew",
        "OneHostsNoise": "noise_is_drawn_anew",
        "ShortSteps": "noise_is_drawn_anew",
        "SharedNoiseInRounds": "ranks_draw_their_own",
        "ShapeMakesCells": "granularity",
        "ScratchByLength": "calls_may_interleave",
        "YieldsByLength": "exchanges_may_interleave",
        "NothingToAdd": "every_rank_takes_part",
        "CountsItsSchedule": "schedule_goes_by_the_step",
        "LooksAtNoRange": "is_a_value",
    },
    "surroundings": {
        "NamesInLetters": "every_shape_and_name",
        "OnlyMatrices": "every_shape_and_name",
        "CellForEachCore": "another_process_agrees",
        "FirstOnItsHost": "another_process_agrees",
        "RankIn8Bits": "late_steps_and_large_seeds",
        "FixedPoint": "many_ranks",
        "OffsetIn16Bits": "granularity",
    },
    "written": {
        "EpsilonBesideOmega": "unbiased",
        "GapAsLargeAsAJump": "large_tensors",
        "GapWithoutItsJump": "large_tensors",
        "CountsJumps": "can_be_chained",
        "HashesByName": "another_process_agrees",
        "HashesOfOneRank": "replicas_agree",
        "CandidatesByOwnData": "every_rank_takes_part",
        "YieldsScratchLater": "compresses_a_tensor",
        "ValuesNotDivided": "mean_of_equal_gradients",
        "LocalNotWritten": "local_is_written",
        "TakesNoLocal": "local_is_written",
        "LocalIsOut": "shares_make_the_mean",
        "LocalOfWhatWasMeant": "can_be_chained",
        "ClaimsTooMuchInRounds": "mean_of_ranks",
        "LooksAtWhatIsGone": "every_element_has_its_turn",
        "WantsADimension": "every_length",
        "RemembersInRounds": "memory_is_declared",
    },
    "lent": {
        "KeepsSlots": "leaves_its_input_alone",
        "KeepsScaleSlot": "leaves_its_input_alone",
        "KeepsWhatItDecodes": "leaves_its_input_alone",
        "KeepsLocal": "leaves_its_input_alone",
        "KeepsOutForItself": "leaves_its_input_alone",
        "KeepsFinished": "leaves_its_input_alone",
        "KeepsReceived": "leaves_its_input_alone",
        "KeepsReceivedScale": "leaves_its_input_alone",
        "KeepsHeld": "leaves_its_input_alone",
        "SendsHeld": "leaves_its_input_alone",
        "YieldsHeldTooLate": "compresses_a_tensor",
        "ChangesWhatItReceived": "compresses_a_tensor",
        "KeepsResidual": "leaves_its_input_alone",
        "KeepsContext": "leaves_its_input_alone",
    },
    "program": {
        "SilencesWarnings": "leaves_the_program_alone",
        "SilencesWarningsOfDecoding": "leaves_the_program_alone",
        "LeavesAFilter": "leaves_the_program_alone",
        "SilencesNumPyOnce": "leaves_the_program_alone",
        "SilencesNumPyInRounds": "leaves_the_program_alone",
        "RaisesOnErrors": "leaves_the_program_alone",
        "SeedsWhereItDecodes": "leaves_the_program_alone",
        "SeedsInWarmUp": "leaves_the_program_alone",
        "OneThread": "leaves_the_program_alone",
        "OneThreadIfNoneIsSet": "leaves_the_program_alone",
        "StopsTheCollector": "leaves_the_program_alone",
        "PrintsFewDigits": "leaves_the_program_alone",
        "SilencesLogging": "leaves_the_program_alone",
        "ChangesFolder": "leaves_the_program_alone",
        "LeavesThreads": "leaves_the_program_alone",
        "LeavesFiles": "leaves_the_program_alone",
    },
    "launched": {
        "FirstLaunchOnly": "many_tensors_agree",
        "ThirtyTwoAtATime": "many_tensors_agree",
        "DecodesThirtyTwo": "many_tensors_agree",
        "ContextOfTheFirst": "many_tensors_agree",
        "OffsetForgottenInLaunch": "many_tensors_agree",
        "StageForgottenInLaunch": "many_tensors_agree",
        "NeighboursShareNaN": "many_tensors_agree",
        "NeighboursLoseResiduals": "many_tensors_agree",
        "ResidualsKeepNaN": "many_tensors_agree",
        "AlignedOnly": "many_tensors_agree",
        "WritesWholeCells": "many_tensors_agree",
        "OnlyFloat32": "many_tensors_agree",
        "EmptyEndsTheLaunch": "many_tensors_agree",
        "ScaleBeforeResidual": "many_tensors_agree",
        "ScratchOfALaunch": "many_tensors_agree",
        "VaryingThirtyTwo": "many_varying_tensors_agree",
        "VaryingSharesNaN": "many_varying_tensors_agree",
        "VaryingSumsTwo": "many_varying_tensors_agree",
        "VaryingSharesMemory": "many_varying_tensors_agree",
    },
    "gradients": {
        "LargestIsPositive": "both_signs_arrive",
        "WholeIsPositive": "both_signs_arrive",
        "ScaleOfTheMean": "both_signs_arrive",
        "DeviationAsScale": "every_element_has_its_turn",
        "OneHugeHidesAll": "scales_with_its_values",
        "SumsSkipZeros": "sums_keep_what_is_not_finite",
        "SumsLeaveNaNOut": "sums_keep_what_is_not_finite",
        "AccumulateSkipsZeros": "one_overflow_is_survived",
        "FusedLosesNaN": "fused_feedback_agrees",
        "EncodesNaNAway": "non_finite_stays_visible",
        "SecondStageLosesNaN": "sums_keep_what_is_not_finite",
        "NaNAtTheEndOfACell": "non_finite_stays_visible",
        "TwoOverflowsCancel": "one_overflow_is_survived",
        "InfBySign": "one_overflow_is_survived",
        "DecaysToZero": "both_signs_arrive",
        "NoneAboveTheMean": "every_element_has_its_turn",
        "WholePartsOfTheLargest": "both_signs_arrive",
    },
    "onesided": {
        "MaximumWithoutAbs": "both_signs_arrive",
        "MaximumOfCells": "both_signs_arrive",
        "MeanOfPositives": "both_signs_arrive",
        "SignedMean": "both_signs_arrive",
        "MaximumInRounds": "both_signs_arrive",
        "RangeFromZero": "both_signs_arrive",
        "RangeOfMinMax": "every_element_has_its_turn",
        "RangeWithoutZero": "both_signs_arrive",
        "DeviationScale": "every_element_has_its_turn",
        "ThresholdOfDeviation": "every_element_has_its_turn",
        "LargestPositive": "large_tensors both_signs_arrive",
        "SortsByValue": "every_element_has_its_turn",
        "HugeInFloat16": "one_of_many_stays_finite",
    },
    "moved": {
        "RefusesAFewMore": "memory_moves_to_other_ranks",
        "ConsolidatesToDouble": "memory_moves_to_other_ranks",
        "ConsolidatesOnlyTheLast": "memory_moves_to_other_ranks",
        "ConsolidatesSelf": "memory_moves_to_other_ranks",
        "RegroupsHalf": "memory_moves_to_other_ranks",
        "AveragesInIntegers": "gradient_units",
        "KeepsMatrix": "gradient_units",
        "KeepsListOfArrays": "resumes_from_a_checkpoint",
        "KeepsNumbersAsKeys": "resumes_from_a_checkpoint",
        "WritesToLoaded": "gradient_units",
        "EmptiedInTheMiddle": "deterministic",
        "OneResidualForAllRanks": "shares_make_the_mean",
        "LostOnNewRanks": "memory_moves_to_other_ranks",
        "ExpectsNamedArrays": "memory_moves_to_other_ranks",
        "UnitsOfNothing": "gradient_units",
        "SquaresInUnits": "gradient_units",
    },
}
# By module and class: words of the message, without which its author would look elsewhere.
SAYS = {
    ("moved", "ConsolidatesSelf"): ("two ranks would then write to", "return a copy"),
    ("moved", "WritesToLoaded"): ("not writeable", "multiplied in place"),
    ("written", "EpsilonBesideOmega"): ("2^-40 times", "an epsilon"),
    ("written", "HashesOfOneRank"): ("ctx.rng(shared=True)",),
    ("written", "YieldsScratchLater"): ("ctx.workspace.held(n)",),
    ("written", "ValuesNotDivided"): ('Round(values, "sum")', "ctx.size"),
    ("written", "LocalNotWritten"): ("local[:] = 0",),
    ("written", "LocalOfWhatWasMeant"): ("'| shared_int'", 'Round(values, "mean", values)'),
    ("written", "ClaimsTooMuchInRounds"): ("for delta=0.5", "holds for every x"),
    ("written", "LooksAtWhatIsGone"): ("0 in every one of 1000 steps", "before the next yield"),
    ("written", "WantsADimension"): ("scalar",),
    ("written", "LocalIsOut"): ("zeros alone", "this rank's own x"),
    ("written", "GapAsLargeAsAJump"): ("65535",),
    ("rounds", "SumNotDivided"): ('Round(values, "sum")',),
    ("heldout", "AlwaysTheSamePlaces"): ("Among equals",),
    ("values", "LosesTheLast"): ("is lost, whatever it is",),
    ("states", "RemembersNothingAtFirst"): ("empty at any step", "ctx.state.get('count')"),
    ("rounds", "LocalOfNothing"): ('Round(values, "mean", values)',),
    ("rounds", "NaNInMax"): ("may lose NaN", "send Inf"),
    ("rounds", "RoomForFew"): ("That is with 33 ranks", "divided by ctx.size"),
    ("surroundings", "OnlyMatrices"): ("'shape': (8, 9, 10)",),
    ("surroundings", "RankIn8Bits"): ("{'rank': 1000}", "8-bit"),
    ("states", "RegroupsWhatIsShared"): ("regrouped()", "return {}"),
    ("lent", "KeepsSlots"): (
        "ctx.state['codes'] shares memory with payload['codes'] of encode_into",
    ),
    ("lent", "KeepsReceived"): ("what a round received", "copy it"),
    ("lent", "KeepsContext"): ("ctx is still held after the call", "on the class"),
    ("program", "SilencesNumPyOnce"): ("a call changes what np.seterr() sets", "np.errstate(...)"),
    ("program", "LeavesFiles"): ("every call leaves an open file behind", "close what is opened"),
    ("launched", "FirstLaunchOnly"): ("second launch", "nor what was launched before"),
    ("launched", "VaryingSharesMemory"): ("return new arrays, which wait to be sent",),
    ("gradients", "WholeIsPositive"): ("all negative", "Take magnitudes first"),
    ("gradients", "InfBySign"): ("inf on one rank and -inf on the other",),
    ("gradients", "SumsLeaveNaNOut"): ("NaN vanished in sum_into", "nansum"),
    ("onesided", "SignedMean"): ("cancel in a scale", "xp.abs(x.mean())"),
    ("onesided", "HugeInFloat16"): ("among 200000 zeros",),
    ("edges", "ConstantIsLost"): ("all equal", "range of values is 0"),
}
BASES = {"Stochastic", "Rounds"}
CASES = [(module, name) for module, found in CAUGHT.items() for name in found]


def plugins(module):
    found = vars(importlib.import_module(f"broken.{module}")).values()
    mine = [cls for cls in found if inspect.isclass(cls) and cls.__module__ == f"broken.{module}"]
    return {cls.__name__: cls for cls in mine if issubclass(cls, Compressor)}


@pytest.mark.parametrize("module", CAUGHT)
def test_no_broken_plugin_is_left_out(module):
    assert plugins(module).keys() - BASES == CAUGHT[module].keys()


@functools.cache
def failures(module, name):
    with known_surroundings():  # which some of them change
        return failures_of(plugins(module)[name](), all_checks())


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    yield
    left = importlib.import_module("broken.program")
    left.LeavesThreads.ended.set()
    for opened in left.LeavesFiles.opened:
        opened.close()


# What they do to numbers is their business; NumPy warns of some of it.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("module", "name"), CASES)
def test_a_broken_plugin_is_caught_once(module, name):
    told = failures(module, name)
    found = [failure.partition(" fails '")[2].partition("'")[0] for failure in told]
    assert sorted(found) == sorted(CAUGHT[module][name].split()), "\n\n".join(told)
    for failure in told:
        assert "Why it matters: " in failure
        assert "What to do: " in failure


@pytest.mark.parametrize("name", plugins("right"))
def test_a_right_plugin_raises_no_false_alarm(name):
    check_compressor(plugins("right")[name]())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("module", "name"), SAYS)
def test_a_message_names_the_cure(module, name):
    told = "\n".join(failures(module, name))
    for words in SAYS[module, name]:
        assert words in told


def test_every_check_catches_a_mistake_or_is_named_here():
    caught = {
        name for found in CAUGHT.values() for names in found.values() for name in names.split()
    }
    elsewhere = {check.name for check in all_checks()} - caught
    # Those that the gallery of test_kit.py shows, what others that come first find too, and what
    # takes two modifiers (test_modifiers.py).
    assert elsewhere == {
        "parts_keep_apart",
        "fills_its_output",
        "payload_travels",
        "threads_change_nothing",
        "other_dtypes_are_refused",
        "results_are_float32_at_every_precision",
        "writes_only_where_it_should",
        "tensors_do_not_mix",
    }
