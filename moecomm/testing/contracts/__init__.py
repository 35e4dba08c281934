"""Contract tests: what every transport, codec, algorithm and set of row kernels must do, written once.

Each module has plain functions `check_...` and lists them in `CHECKS`; they raise AssertionError with what is wrong.
A `World` says how ranks are made and which transport they use. To hold your own to the contract, with pytest:

    from moecomm.testing.contracts import World, algorithm, capacity, domains, transport

    WORLD = World(backend="processes", transport="mine")

    @pytest.mark.parametrize("check", transport.CHECKS)
    def test_mine_as_a_transport(check):
        check(WORLD)

    @pytest.mark.parametrize("check", algorithm.CHECKS)
    def test_mine_under_the_algorithms(check):
        check(WORLD)

    @pytest.mark.parametrize("check", capacity.CHECKS)
    def test_mine_with_a_capacity(check):
        check(WORLD)

    @pytest.mark.parametrize("check", domains.CHECKS)
    def test_mine_between_domains(check):
        check(WORLD)
"""

from moecomm.testing.contracts.world import World

__all__ = ["World"]
